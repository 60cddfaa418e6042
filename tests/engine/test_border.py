"""The border between engine and worker is plain data: everything survives being serialised, with the same tokens.

Also what the border promises: each message has only what the worker does not know yet.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import GREEDY, Told, make_engine, run_all, run_steps
from slipstream.core.config import EngineConfig, SpeculationConfig
from slipstream.core.request import Request
from slipstream.core.sampling_params import Guide, SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.executor import SerializedWorker, local_worker
from slipstream.worker.interface import StepInput
from slipstream.worker.null_worker import NullWorker
from speculation_config import speculation_config
from tiny_heads import make_eagle, make_mtp

SEEDED = SamplingParams(max_tokens=20, temperature=0.9, seed=5, ignore_eos=True, top_k=50, top_p=0.95)
EDITED = replace(SEEDED, repetition_penalty=1.2, min_tokens=5, bad_words_ids=((4, 5), (9,)), logit_bias=((7, 2.0),))
LOGPROBS = replace(GREEDY, logprobs=3, prompt_logprobs=2)
GUIDED = SamplingParams(max_tokens=16, temperature=0.0, guide=Guide("regex", "[a-z]{12}"))
PLAIN_DATA = (int, float, str, bytes, bool, type(None), np.ndarray)


def serialized_worker(*arguments: Any) -> SerializedWorker:
    return SerializedWorker(local_worker(*arguments))


def speculation(method: str, model: Path, folder: Path) -> SpeculationConfig:
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "ngram": lambda: {"ngram_min": 1},
        "draft_model": lambda: {"draft_model": str(model), "draft_sampling": "sampled", "acceptance": "rejection"},
        "mtp": lambda: {"mtp_module": str(make_mtp(model, folder))},
        "eagle": lambda: {"eagle_head": str(make_eagle(model, folder))},
    }
    return speculation_config(method, throttle="off", **made[method]())


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("method", ["", "ngram", "draft_model", "mtp", "eagle"])
def test_serialized_messages_say_the_same(
    tiny_llama: Path, tmp_path: Path, prompts: list[list[int]], method: str, overlap: str
) -> None:
    """Greedy, sampled, edited, with log-probabilities; so few blocks that requests are preempted."""
    options: dict[str, Any] = {
        "model": {"max_model_len": 128},
        "cache": {"num_blocks": 34},
        "scheduler": {"max_num_batched_tokens": 40, "overlap_scheduling": overlap},
        "speculation": speculation(method, tiny_llama, tmp_path) if method else None,
    }
    params = [GREEDY, SEEDED, EDITED, LOGPROBS, SEEDED, GREEDY]
    told = []
    for make_worker in (local_worker, serialized_worker):
        engine = make_engine(tiny_llama, make_worker=make_worker, **options)
        told.append([run_all(engine, prompts[1::2], params) for _ in range(2)])  # again from the prefix cache
        engine.close()
    assert told[0] == told[1]
    assert all(len(one.token_ids) == wanted.max_tokens for one, wanted in zip(told[1][0], params))
    assert told[1][0][3].prompt_logprobs is not None and len(told[1][0][3].logprobs) == LOGPROBS.max_tokens


@pytest.mark.parametrize("method", ["", "ngram"])
def test_grammar_masks_cross(tiny_llama: Path, tmp_path: Path, prompts: list[list[int]], method: str) -> None:
    """Guided requests among others, with drafts and without."""
    config = speculation(method, tiny_llama, tmp_path) if method else None
    texts = []
    for make_worker in (local_worker, serialized_worker):
        engine = make_engine(tiny_llama, speculation=config, make_worker=make_worker)
        told = run_all(engine, prompts[4:8], [GUIDED, GREEDY, GUIDED, SEEDED])
        texts.append([(one.error, one.token_ids) for one in told])
        engine.close()
    assert texts[0] == texts[1] and texts[0][0][0] == ""


def test_preemption_happens_and_crosses(tiny_llama: Path, prompts: list[list[int]]) -> None:
    engine = make_engine(
        tiny_llama, model={"max_model_len": 128}, cache={"num_blocks": 20}, make_worker=serialized_worker
    )
    wide = make_engine(tiny_llama)
    long = replace(EDITED, max_tokens=30)
    requests = [engine.submit(Request(list(prompt), long))[0] for prompt in prompts[4:9]]
    told: dict[Request, Told] = {}
    run_steps(engine, told)
    assert sum(request.num_preemptions for request in requests) > 0
    expected = run_all(wide, prompts[4:9], long)
    assert [told[request].token_ids for request in requests] == [one.token_ids for one in expected]


class Recorder(NullWorker):
    """Keeps the messages."""

    def __init__(self) -> None:
        super().__init__(5)
        self.steps: list[StepInput] = []

    def execute(self, step: StepInput) -> None:
        self.steps.append(step)
        super().execute(step)


def recorded(engine_config: Callable[..., Engine], tiny_llama: Path) -> tuple[Engine, Recorder]:
    recorder = Recorder()
    return engine_config(tiny_llama, make_worker=lambda *_: recorder), recorder


def test_a_step_says_only_what_is_new(tiny_llama: Path) -> None:
    engine, recorder = recorded(make_engine, tiny_llama)
    for length in (5, 30):
        engine.submit(Request([7] * length, replace(GREEDY, max_tokens=12)))
    run_steps(engine, {})
    first, *later = recorder.steps
    assert [new.prompt_token_ids for new in first.new_requests] == [[7] * 5, [7] * 30]
    assert not any(step.new_requests for step in later)
    assert all(step.token_ids == [5] * len(step.sequence_ids) for step in later)
    grown = [block for step in later for blocks in step.updates.block_ids.values() for block in blocks]
    assert len(grown) == 3, "each request's blocks once: of 8 tokens, for 17 and 42 of them"
    assert not any(step.updates.output_token_ids for step in later), "nobody reads the text"


def test_who_reads_the_text_gets_it_token_by_token(tiny_llama: Path) -> None:
    engine, recorder = recorded(make_engine, tiny_llama)
    (request,) = engine.submit(Request([7] * 5, replace(GREEDY, max_tokens=6, repetition_penalty=1.5)))
    run_steps(engine, {})
    updates = [step.updates.output_token_ids for step in recorder.steps]
    assert updates == [{}, *[{request.sequence_id: [5]}] * 5]


def test_messages_hold_no_objects_of_the_engine(tiny_llama: Path, prompts: list[list[int]]) -> None:
    engine, recorder = recorded(make_engine, tiny_llama)
    for prompt in prompts[:4]:
        engine.submit(Request(list(prompt), EDITED))
    run_steps(engine, {})
    assert len(recorder.steps) > 10
    for step in recorder.steps:
        check_plain(step)
        assert pickle.loads(pickle.dumps(step)) == step


def check_plain(value: Any) -> None:
    """Numbers, text and containers of them; dataclasses of the border and of settings."""
    if is_dataclass(value):
        assert type(value).__name__ != "Request" and not isinstance(value, EngineConfig)
        for field in fields(value):
            check_plain(getattr(value, field.name))
    elif isinstance(value, dict):
        for key, entry in value.items():
            check_plain(key)
            check_plain(entry)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for entry in value:
            check_plain(entry)
    else:
        assert isinstance(value, PLAIN_DATA), type(value)
