"""Parameters that would be without effect: told in the log, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from slipstream.core.config_checks import unused_options
from slipstream.core.config_parse import parse_config, parse_parameters
from slipstream.core.draft_methods import DRAFT_METHODS
from slipstream.core.errors import ConfigError
from slipstream.core.pbtxt_parameters import read_parameters
from slipstream.core.wire_messages import Config

ENTRY = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}\n'


def told(folder: Path, **parameters: str) -> list[str]:
    return unused_options(parse_parameters({"model": "/m", "load_format": "null", **parameters}, folder))


def test_options_of_a_method_that_is_not_loaded_are_told(tmp_path: Path) -> None:
    without = "has no effect: speculative_method does not name"
    assert told(tmp_path, ngram_max="3", eagle_top_k="2", speculative_method="medusa", medusa_heads="/heads") == [
        f"ngram_max=3 {without} ngram",
        f"eagle_top_k=2 {without} eagle",
    ]
    assert told(tmp_path, medusa_heads="/heads") == [f"medusa_heads='/heads' {without} medusa"]
    assert not told(tmp_path, ngram_max="3", speculative_method="ngram")
    assert not told(tmp_path, ngram_max="4", eagle_top_k="4"), "their defaults may be written down"
    assert not told(tmp_path, draft_model="draft"), "a model of the repository may be named before it is wanted"
    assert not unused_options(parse_parameters({"task": "tokenize", "tokenizer": "/t", "ngram_max": "3"}, tmp_path))


def received(folder: Path, **parameters: str) -> Config:
    given = {name: {"string_value": value} for name, value in {"model": "/m", **parameters}.items()}
    return Config("llm", 1, str(folder), json.dumps({"parameters": given}))


def test_a_parameter_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    pbtxt = tmp_path / "config.pbtxt"
    pbtxt.write_text(ENTRY.format("num_blocks", 4) + ENTRY.format("max_num_seqs", 2) + ENTRY.format("num_blocks", 8))
    with pytest.raises(ConfigError, match=r"^num_blocks='8': given twice in config.pbtxt, also as '4', and the last"):
        parse_config(received(tmp_path, num_blocks="8", max_num_seqs="2"))
    assert parse_config(received(tmp_path, num_blocks="16")).cache.num_blocks == 16, "loaded with another configuration"
    pbtxt.write_text(ENTRY.format("num_blocks", 8) * 2)
    assert parse_config(received(tmp_path, num_blocks="8")).cache.num_blocks == 8
    pbtxt.unlink()
    assert parse_config(received(tmp_path, num_blocks="8")).cache.num_blocks == 8


def test_with_a_configuration_of_another_name_that_one_counts(tmp_path: Path) -> None:
    """config.pbtxt, which Triton had not read, was found fault with, and the other file was not."""

    def parse(num_blocks: str, config_name: str) -> int:
        one = received(tmp_path, num_blocks=num_blocks)
        triton = {**json.loads(one.config_json), "model_config_name": config_name}
        return parse_config(replace(one, config_json=json.dumps(triton))).cache.num_blocks

    (tmp_path / "config.pbtxt").write_text(ENTRY.format("num_blocks", 4) + ENTRY.format("num_blocks", 8))
    (tmp_path / "configs").mkdir()
    named = tmp_path / "configs/h100.pbtxt"
    named.write_text(ENTRY.format("num_blocks", 8))
    assert parse("8", "h100") == 8
    named.write_text(ENTRY.format("num_blocks", 16) + ENTRY.format("num_blocks", 32))
    with pytest.raises(ConfigError, match=r"^num_blocks='32': given twice in h100.pbtxt, also as '16'"):
        parse("32", "h100")
    with pytest.raises(ConfigError, match=r"^num_blocks='8': given twice in config.pbtxt"):
        parse("8", "another")  # of which this model has no file


def test_a_drafter_that_is_a_served_model_is_read_there_too(tmp_path: Path) -> None:
    (tmp_path / "draft/configs").mkdir(parents=True)
    for name, model in (("config", "/plain"), ("configs/h100", "/named")):
        (tmp_path / f"draft/{name}.pbtxt").write_text(ENTRY.format("model", model))
    given = {"model": "/m", "load_format": "null", "speculative_method": "draft_model", "draft_model": "draft"}
    for config_name, model in (("", "/plain"), ("h100", "/named"), ("another", "/plain")):
        config = parse_parameters(given, tmp_path / "llm", config_name=config_name)
        assert config.speculation.checkpoint_of(DRAFT_METHODS.get("draft_model")) == model


def test_parameters_are_found_in_every_form_of_the_text_format() -> None:
    text = r"""
    name: "llm"  # parameters { key: "a" value { string_value: "commented" } }
    parameters { key: "a" value { string_value: "1" } }
    parameters: { key: 'b', value: { string_value: 'it "is" # no comment' } };
    parameters [ { key: "c" value < string_value: "one " "two" > }, { value { string_value: "{\"x\": 1}" } key: "d" } ]
    ensemble_scheduling { step [ { input_map { key: "a" value: "text" } } ] }
    model_warmup { inputs { key: "a" value { data_type: TYPE_STRING dims: [ 1 ] } } }
    parameters { key: "e" value { } }
    """
    assert list(read_parameters(text)) == [
        ("a", "1"),
        ("b", 'it "is" # no comment'),
        ("c", "one two"),
        ("d", '{"x": 1}'),
        ("e", ""),
    ]
