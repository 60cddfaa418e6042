"""Scales of an FP8 KV cache that a checkpoint brings along: every spelling is found, used with fp8, and checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_driver import GREEDY, make_engine, run_all
from safetensors.torch import load_file, save_file
from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.decoder import Decoder
from slipstream.nn.load import check_model, load_model
from slipstream.nn.read_spec import read_spec
from tiny_model import make_tiny_llama

LAYER = "model.layers.1.self_attn"
SPELLINGS = {
    "llm-compressor": (f"{LAYER}.k_scale", f"{LAYER}.v_scale"),
    "vllm": (f"{LAYER}.attn.k_scale", f"{LAYER}.attn.v_scale"),
    "modelopt": (f"{LAYER}.k_proj.k_scale", f"{LAYER}.v_proj.v_scale"),
    "autofp8": (f"{LAYER}.k_proj.output_scale", f"{LAYER}.v_proj.output_scale"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def with_tensors(checkpoint: Path, folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    for path in checkpoint.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
    assert json.loads((folder / "config.json").read_text())
    save_file({**load_file(checkpoint / "model.safetensors"), **tensors}, folder / "model.safetensors")
    return folder


def load(path: Path) -> Decoder:
    return load_model(ModelConfig(model=str(path), device="cpu"))


@pytest.mark.parametrize("writer", SPELLINGS)
def test_every_spelling(writer: str, checkpoint: Path, tmp_path: Path) -> None:
    k, v = SPELLINGS[writer]
    stored = with_tensors(checkpoint, tmp_path / "c", **{k: torch.tensor([0.25]), v: torch.tensor(0.5)})
    first, second = (layer.attention for layer in load(stored).layers[:2])
    assert not first.kv_scales
    assert [set(scale.tolist()) for scale in second.kv_scales.values()] == [{0.25}, {0.5}]


@pytest.mark.parametrize(
    "quantization",
    [
        {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "format": "dense",
            "kv_cache_scheme": {"num_bits": 8},
        },
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ],
)
def test_a_checkpoint_of_which_the_cache_alone_is_quantised(
    checkpoint: Path, tmp_path: Path, quantization: dict[str, object]
) -> None:
    """Queries are not quantised here, so their scales say nothing."""
    scales = {f"{LAYER}.{name}_scale": torch.tensor(0.25) for name in ("k", "v", "q")}
    stored = with_tensors(checkpoint, tmp_path / "c", **scales)
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    decoder = load(stored)
    assert decoder.spec.stored_format is None
    assert [set(scale.tolist()) for scale in decoder.layers[1].attention.kv_scales.values()] == [{0.25}, {0.25}]


def test_one_scale_for_both_and_one_per_head(checkpoint: Path, tmp_path: Path) -> None:
    num_heads = load(checkpoint).spec.layers[1].attention.num_kv_heads
    per_head = torch.arange(1.0, num_heads + 1)
    tensors = {f"{LAYER}.v_scale": per_head.view(-1, 1, 1).bfloat16(), f"{LAYER}.kv_scale": torch.tensor(0.125)}
    scales = load(with_tensors(checkpoint, tmp_path / "c", **tensors)).layers[1].attention.kv_scales
    assert scales["key_scale"].tolist() == [0.125] * num_heads
    assert scales["value_scale"].tolist() == per_head.tolist()
    unset = with_tensors(checkpoint, tmp_path / "d", **{f"{LAYER}.k_scale": torch.tensor(-1.0)})
    scales = load(unset).layers[1].attention.kv_scales
    assert scales["key_scale"].tolist() == [1.0] * num_heads  # how "not calibrated" is written


def test_used_by_an_fp8_cache_alone(checkpoint: Path, tmp_path: Path) -> None:
    """A scale far too small saturates keys and values, so the text shows that it is there."""
    tensors = {f"model.layers.{i}.self_attn.kv_scale": torch.tensor(1e-4) for i in range(2)}
    scaled = with_tensors(checkpoint, tmp_path / "c", **tensors)

    def text(path: Path, kv_type: str) -> list[int]:
        engine = make_engine(path, cache={"dtype": kv_type})
        return run_all(engine, [list(range(5, 40))], GREEDY)[0].token_ids

    assert text(scaled, "fp8_e4m3") != text(checkpoint, "fp8_e4m3")
    for kv_type in ("auto", "int8"):
        assert text(scaled, kv_type) == text(checkpoint, kv_type)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.ones(3), r"k_scale has shape \[3\], config.json implies \[2\]"),
        (torch.ones(1, dtype=torch.int64), "k_scale has type I64; accepted: F32"),
        (torch.tensor(float("nan")), "k_scale is not finite"),
    ],
)
def test_refusals(checkpoint: Path, tmp_path: Path, tensor: torch.Tensor, says: str) -> None:
    stored = with_tensors(checkpoint, tmp_path / "c", **{f"{LAYER}.k_scale": tensor})
    with pytest.raises(ConfigError, match=says):
        load(stored)


def test_validation_sees_them(checkpoint: Path, tmp_path: Path) -> None:
    spec = read_spec(checkpoint)
    stored = with_tensors(checkpoint, tmp_path / "c", **{f"{LAYER}.k_scale": torch.ones(5)})
    with pytest.raises(ConfigError, match="k_scale has shape"):
        check_model(ModelConfig(model=str(stored)), spec, torch.device("cpu"), torch.float32)
