"""The length that config.json tells those who load no model is the one that the model serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published_configs import PUBLISHED
from slipstream.core.checkpoint_length import checkpoint_length
from slipstream.nn.read_spec import read_spec
from tiny_checkpoints import make_checkpoint

VARIANTS = ["gemma3", "gemma3-seeing", "olmo3", "mistral-seeing", "phi3-longrope", "chatglm", "deepseek-v3", "cwm"]
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
SCALINGS: list[dict[str, object]] = [
    {"rope_type": "default"},
    {"type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 1.5},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn"},
    YARN,
    {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {**YARN, **FACTORS, "rope_type": "longrope"},
]


def write(folder: Path, values: dict[str, object]) -> None:
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("name", PUBLISHED)
def test_of_published_configs(name: str, tmp_path: Path) -> None:
    """0: by a name of the family's, or nowhere."""
    write(tmp_path, PUBLISHED[name][0])
    assert checkpoint_length(tmp_path) in (0, read_spec(tmp_path).max_model_len)


@pytest.mark.parametrize("variant", VARIANTS)
def test_of_stored_scalings(variant: str, tmp_path: Path) -> None:
    make_checkpoint(variant, tmp_path)
    assert checkpoint_length(tmp_path) == read_spec(tmp_path).max_model_len > 0


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling.get("rope_type", "type"))
@pytest.mark.parametrize("variant", ["llama2-mha", "gemma3"])
def test_of_the_parameter(variant: str, scaling: dict[str, object], tmp_path: Path) -> None:
    make_checkpoint(variant, tmp_path)
    assert checkpoint_length(tmp_path, json.dumps(scaling)) == read_spec(tmp_path, json.dumps(scaling)).max_model_len


def test_a_scaling_without_a_factor_stretches_nothing(tmp_path: Path) -> None:
    """The checkpoint's original length is far above the one that it declares."""
    make_checkpoint("cwm", tmp_path)
    scaling = '{"type": "yarn"}'
    assert checkpoint_length(tmp_path, scaling) == read_spec(tmp_path, scaling).max_model_len == 64


@pytest.mark.parametrize(
    "values",
    [{}, {"max_position_embeddings": "many"}, {"max_position_embeddings": None}, {"text_config": 1}, [],
     {"max_position_embeddings": 8, "rope_scaling": {"rope_type": "linear", "factor": "many"}},
     {"max_position_embeddings": 8, "rope_scaling": {"rope_type": "linear", "factor": 1e999}}],
)  # fmt: skip
def test_what_says_nothing(values: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert checkpoint_length(tmp_path) == checkpoint_length(tmp_path / "absent") == 0


def test_a_parameter_that_is_no_json_says_nothing(tmp_path: Path) -> None:
    write(tmp_path, {"max_position_embeddings": 8})
    assert [checkpoint_length(tmp_path, given) for given in ("", "yarn", "[]")] == [8, 0, 0]
