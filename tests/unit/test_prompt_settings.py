"""Settings of vLLM that concern the prompt and log-probabilities: what is kept, what it costs, what is refused."""

from __future__ import annotations

import json

import pytest
import toy_tokenizers
from slipstream.core.config import EngineConfig, ModelConfig, ServingConfig
from slipstream.core.errors import RequestError
from slipstream.core.request import Request
from slipstream.protocol import wire
from slipstream.protocol.request_parser import parse_request
from slipstream.tokenizer.tokenizer import TextTokenizer
from wire_requests import request, tensor

TOKENIZER = TextTokenizer(toy_tokenizers.sentencepiece())
CONFIG = EngineConfig()


def parsed(prompt: wire.Tensor, config: EngineConfig = CONFIG, **fields: object) -> Request:
    given = tensor("sampling_parameters", json.dumps(fields))
    client = parse_request(request(prompt, given), config, TOKENIZER)
    assert client.request is not None
    return client.request


def text_input(text: str) -> wire.Tensor:
    return tensor("text_input", text)


def test_a_truncated_prompt_is_its_end_behind_the_tokens_put_in_front() -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 30
    whole = TOKENIZER.encode(text, True)
    first = TOKENIZER.encode("", True)
    assert len(first) == 1 and whole[:1] == first

    def prompt(given: wire.Tensor, config: EngineConfig = CONFIG, **fields: object) -> list[int]:
        return parsed(given, config, **fields).prompt_token_ids

    prompt_text = text_input(text)
    assert prompt(prompt_text, truncate_prompt_tokens=7) == first + whole[-6:]
    assert prompt(prompt_text, truncate_prompt_tokens=7, add_special_tokens=False) == whole[-7:]
    assert prompt(prompt_text, truncate_prompt_tokens=10**6) == whole
    assert prompt(tensor("input_ids", [5, 6, 7, 8]), truncate_prompt_tokens=3) == [6, 7, 8]
    short = EngineConfig(model=ModelConfig(max_model_len=64))
    with pytest.raises(RequestError, match="the prompt has"):
        prompt(prompt_text, short)
    assert prompt(prompt_text, short, truncate_prompt_tokens=-1, max_tokens=14) == first + whole[-49:]
    assert len(prompt(prompt_text, short, truncate_prompt_tokens=-1, max_tokens=10**6)) == 63, "room for a token"
    with pytest.raises(RequestError, match="got 65, accepted: 1 to max_model_len=64, or -1"):
        prompt(prompt_text, short, truncate_prompt_tokens=65)


def test_a_truncated_prompt_costs_no_more_than_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    encode = TOKENIZER.encode
    monkeypatch.setattr(TOKENIZER, "encode", lambda text, add=True: lengths.append(len(text)) or encode(text, add))
    parsed(text_input("a b " * 250_000), truncate_prompt_tokens=500)
    assert max(lengths) == 4096
    parsed(text_input(" " * 1_000_000), truncate_prompt_tokens=2000)
    assert max(lengths) <= 32_000


def test_the_whole_vocabulary_as_logprobs_is_the_operators_choice() -> None:
    config = EngineConfig(serving=ServingConfig(max_logprobs=-1))
    prompt = text_input("The quick brown")
    assert parsed(prompt, config, logprobs=-1, max_tokens=2).params.logprobs == -1
    with pytest.raises(RequestError, match=rf"1000000 tokens x \(1 \+ logprobs={TOKENIZER.vocab_size}\)"):
        parsed(prompt, config, logprobs=-1, max_tokens=10**6)
    assert parsed(prompt, logprob_token_ids=[5, 6]).params.logprobs == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": 21}, "logprobs: got 21, accepted: 0 to max_logprobs=20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: got -1, accepted: 0 to max_logprobs=20"),
        ({"logprobs": -2}, "logprobs: got -2, accepted: an integer from 0"),
        ({"logprob_token_ids": list(range(129))}, "logprob_token_ids: got .*, accepted: token ids .*, at most 128"),
        ({"detokenize": False, "stop": "a"}, "stop: stop strings are found in text, accepted: none"),
        ({"output_kind": 1}, "output_kind: got 1, accepted: nothing"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens: got 0, accepted: an integer from 1"),
    ],
)
def test_what_is_refused_is_named_with_what_is_accepted(fields: dict, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        parsed(text_input("The quick brown"), **fields)
