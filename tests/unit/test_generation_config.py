"""generation_config.json gives requests their sampling defaults: request > config.pbtxt > the file; wrong values are
refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import toy_tokenizers
from slipstream.core.config import EngineConfig
from slipstream.core.config_parse import config_from_values
from slipstream.core.errors import ConfigError
from slipstream.core.generation_config import with_generation_defaults
from slipstream.core.sampling_params import SamplingParams
from slipstream.protocol.request_parser import parse_request
from slipstream.tokenizer.tokenizer import TextTokenizer
from wire_requests import request, tensor

TOKENIZER = TextTokenizer(toy_tokenizers.byte_level())
PUBLISHED = {  # as Qwen and Llama have it
    "bos_token_id": 1,
    "do_sample": True,
    "eos_token_id": [2, 3],
    "max_length": 4096,
    "max_new_tokens": 2048,
    "min_p": 0.05,
    "pad_token_id": None,
    "repetition_penalty": 1.05,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.8,
    "transformers_version": "4.51.0",
}


def config_of(folder: Path, values: object, **parameters: object) -> EngineConfig:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return with_generation_defaults(config_from_values({"model": str(folder), **parameters}), folder)


def params(config: EngineConfig, **asked: object) -> SamplingParams:
    prompt, sampling = tensor("text_input", "The fox"), tensor("sampling_parameters", json.dumps(asked))
    client = parse_request(request(prompt, sampling), config, TOKENIZER)
    assert client.request is not None
    return client.request.params


def test_a_request_that_says_nothing_has_the_files_values(tmp_path: Path) -> None:
    got = params(config_of(tmp_path, PUBLISHED))
    assert (got.temperature, got.top_k, got.top_p, got.min_p) == (0.6, 20, 0.8, 0.05)
    assert (got.repetition_penalty, got.max_tokens) == (1.05, 2048)


def test_the_request_comes_first(tmp_path: Path) -> None:
    config = config_of(tmp_path, PUBLISHED)
    got = params(config, temperature=1.5, max_tokens=5)
    assert (got.temperature, got.top_k, got.max_tokens) == (1.5, 20, 5)
    got = params(config, top_p=0.5)
    assert (got.temperature, got.top_p) == (0.6, 0.5), "a request's top_p leaves the file's temperature"


def test_config_pbtxt_comes_before_the_file(tmp_path: Path) -> None:
    config = config_of(tmp_path, PUBLISHED, default_temperature="0", default_max_tokens=16)
    got = params(config)
    assert got.is_greedy and (got.max_tokens, got.top_k) == (16, 20)
    assert params(config, top_k=7).temperature == 1.0, "default_temperature is for requests without top_k and top_p"


def test_the_file_can_be_passed_over(tmp_path: Path) -> None:
    config = config_of(tmp_path, {**PUBLISHED, "top_p": 9}, generation_config="none")
    assert params(config) == params(EngineConfig())
    with pytest.raises(ConfigError, match=r"generation_config='no': accepted: auto, none"):
        config_of(tmp_path, {}, generation_config="no")


@pytest.mark.parametrize("values", [None, {}, {"temperature": None, "eos_token_id": [2]}])
def test_a_file_without_values_changes_nothing(tmp_path: Path, values: object) -> None:
    config = with_generation_defaults(EngineConfig(), tmp_path) if values is None else config_of(tmp_path, values)
    assert params(config) == params(EngineConfig())


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"top_p": 1.5}, r"generation_config.json top_p=1.5: accepted: a number from 0 to 1; or .*generation_config"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": "0.6"}, "temperature='0.6'"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"top_k": True}, "top_k=True"),
        ({"min_p": 2}, "min_p=2"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: accepted: a number from 0.01 to 10"),
        ({"max_new_tokens": 0}, "generation_config.json max_new_tokens=0"),
        ([1], "must hold a JSON object"),
    ],
)
def test_a_value_out_of_range_is_named(tmp_path: Path, values: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config_of(tmp_path, values)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    for text, named in (
        ("{", "not readable as JSON"),
        ("[" * 2000, "not readable"),
        (" " * (2 << 20), "at most 1048576"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=named):
            with_generation_defaults(EngineConfig(), tmp_path)
