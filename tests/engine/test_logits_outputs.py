"""context_logits and generation_logits are Hugging Face's, whatever else a request asks for, and have a bound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_driver import GREEDY, Told, make_engine, run_steps
from slipstream.core.config import SpeculationConfig
from slipstream.core.errors import CapacityError, RequestError
from slipstream.core.outputs import StepOutput
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.logits_budget import LogitsBudget
from transformers import AutoModelForCausalLM

BOTH = replace(GREEDY, max_tokens=6, return_context_logits=True, return_generation_logits=True)


def rows(found: list[bytes]) -> np.ndarray:
    return np.stack([np.frombuffer(row, np.float32) for row in found])


class Asked(Told):
    """The logits too."""

    context: np.ndarray | None = None

    def take(self, output: StepOutput) -> None:
        super().take(output)
        if output.context_logits is not None:
            assert self.context is None
            self.context = rows(output.context_logits)

    @property
    def generation(self) -> np.ndarray:
        return rows([entry.logits for entry in self.logprobs])


def ask(engine: Engine, prompt: list[int], params: SamplingParams = BOTH) -> list[Asked]:
    sequences = engine.submit(Request(list(prompt), params))
    told: dict[Request, Told] = {sequence: Asked() for sequence in sequences}
    run_steps(engine, told)
    return [told[sequence] for sequence in sequences]  # type: ignore[misc]


def of_hugging_face(checkpoint: Path, token_ids: list[int]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([token_ids])).logits[0].numpy()
    return logits


@pytest.fixture(scope="module")
def chunked(tiny_llama: Path) -> Engine:
    """Prompts take several steps, and what one has computed the next may find."""
    return make_engine(tiny_llama, scheduler={"max_num_batched_tokens": 16})


@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_logits_are_those_of_hugging_face(chunked: Engine, tiny_llama: Path, num_tokens: int) -> None:
    prompt = [7 + 3 * index for index in range(num_tokens)]
    for _ in range(2):
        (asked,) = ask(chunked, prompt)
        expected = of_hugging_face(tiny_llama, prompt + asked.token_ids)
        assert asked.context is not None and asked.context.shape == (num_tokens, expected.shape[1])
        np.testing.assert_allclose(asked.context, expected[:num_tokens], atol=2e-4)
        np.testing.assert_allclose(asked.generation, expected[num_tokens - 1 : -1], atol=2e-4)


def test_each_is_sent_alone(chunked: Engine) -> None:
    prompt = [5, 6, 7]
    (both,) = ask(chunked, prompt)
    (context,) = ask(chunked, prompt, replace(BOTH, return_generation_logits=False))
    (generation,) = ask(chunked, prompt, replace(BOTH, return_context_logits=False))
    assert not any(entry.logits for entry in context.logprobs) and generation.context is None
    np.testing.assert_allclose(context.context, both.context, atol=1e-4)
    np.testing.assert_allclose(generation.generation, both.generation, atol=1e-4)


def test_they_are_the_models_own_whatever_is_edited(chunked: Engine) -> None:
    (plain,) = ask(chunked, [5, 6, 7])
    token_id = plain.token_ids[0]
    (edited,) = ask(chunked, [5, 6, 7], replace(BOTH, logit_bias=((token_id, -100.0),), repetition_penalty=1.3))
    assert edited.token_ids[0] != token_id
    np.testing.assert_allclose(edited.generation[0], plain.generation[0], atol=1e-4)


def test_sequences_have_their_own_and_one_prompt(chunked: Engine, tiny_llama: Path) -> None:
    prompt = [5, 6, 7]
    asked = ask(chunked, prompt, replace(BOTH, n=3, temperature=1.0, seed=1))
    assert [one.context is None for one in asked] == [False, True, True]
    for one in asked:
        expected = of_hugging_face(tiny_llama, prompt + one.token_ids)
        np.testing.assert_allclose(one.generation, expected[len(prompt) - 1 : -1], atol=2e-4)


def test_drafts_change_nothing(tiny_llama: Path) -> None:
    prompt = [5, 6, 7, 8] * 5
    engine = make_engine(tiny_llama, speculation=SpeculationConfig(methods="ngram", num_draft_tokens=3))
    (asked,) = ask(engine, prompt, replace(BOTH, max_tokens=20))
    expected = of_hugging_face(tiny_llama, prompt + asked.token_ids)
    np.testing.assert_allclose(asked.context, expected[: len(prompt)], atol=2e-4)
    np.testing.assert_allclose(asked.generation, expected[len(prompt) - 1 : -1], atol=2e-4)


def test_beams_have_none(chunked: Engine) -> None:
    with pytest.raises(RequestError, match="return_context_logits"):
        replace(BOTH, beam_width=2)


def test_running_requests_share_a_budget() -> None:
    def request(handle: int, num_prompt: int = 10, **params: object) -> Request:
        return Request([1] * num_prompt, replace(BOTH, **params), handle=handle)  # type: ignore[arg-type]

    off, on = LogitsBudget(0, 100, 512), LogitsBudget(8000, 100, 512)
    off.take(request(1, return_context_logits=False, return_generation_logits=False))
    with pytest.raises(RequestError, match="max_logits_bytes=0"):
        off.take(request(1))
    on.take(request(1))  # (10 + 6) x 100 x 4
    with pytest.raises(RequestError, match="21 tokens x 100 x 4 = 8400"):
        on.take(request(2, num_prompt=15))
    with pytest.raises(RequestError, match="return_generation_logits"):
        on.take(request(2, return_context_logits=False, n=4))
    with pytest.raises(CapacityError, match="6400 of running"):
        on.take(request(2))
    on.give(1)
    on.give(1)
    on.take(request(2))
