"""Integer weights made at load: the decoder is that of the dequantised weights; sizes and wishes are checked before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import Tensors, linear_names, load, logits, make_full, rms_error
from safetensors.torch import load_file, save_file
from slipstream import LLM, SamplingParams
from slipstream.core.config import ModelConfig
from slipstream.core.config_parse import config_from_values
from slipstream.core.errors import ConfigError
from slipstream.nn.load import load_model, weight_bytes
from slipstream_kernels import ops

WEIGHT_ONLY = [("wint8", 0), ("wint4", 0), ("wint4", 64), ("wint4", 32), ("wint4", -1)]
# the other 8-bit operand adds its own rounding: to e4m3's 3 bits of fraction, or to 1/127 of the largest of a row
INPUTS_TOO = [("w4a8_fp8", 128, 0.1), ("w4a8_fp8", -1, 0.1), ("w8a8_int8", 0, 0.03)]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_full(tmp_path_factory.mktemp("full"))


def dequantised(full: Path, folder: Path, method: str, group_size: int, head: bool = False) -> Path:
    """The checkpoint with each linear's weights replaced by what its quantised form stands for."""
    (folder / "config.json").write_text((full / "config.json").read_text())
    tensors: Tensors = load_file(full / "model.safetensors")
    for name in [*linear_names(tensors), *["lm_head"] * head]:
        weight = tensors.get(f"{name}.weight", tensors["model.embed_tokens.weight"])
        if method in ("wint8", "w8a8_int8"):
            rows = ops.quantize_int8_weight(weight)
            held = rows.values * rows.scales[:, None]
        else:
            held = ops.dequantize_int4(ops.quantize_int4(weight, {0: 128, -1: 0}.get(group_size, group_size)))
        assert 0.002 < rms_error(held, weight) < 0.2
        tensors[f"{name}.weight"] = held
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("method", "group_size"), WEIGHT_ONLY)
def test_weights_alone(full: Path, tmp_path: Path, method: str, group_size: int) -> None:
    decoder = load(full, quantization=method, quantization_group_size=group_size)
    expected = logits(load(dequantised(full, tmp_path, method, group_size)))
    assert rms_error(logits(decoder), expected) < 1e-5
    assert 0.005 < rms_error(logits(decoder), logits(load(full))) < 0.3


@pytest.mark.parametrize(("method", "group_size", "bound"), INPUTS_TOO)
def test_weights_and_inputs(full: Path, tmp_path: Path, method: str, group_size: int, bound: float) -> None:
    decoder = load(full, quantization=method, quantization_group_size=group_size)
    expected = logits(load(dequantised(full, tmp_path, method, group_size)))
    assert 0.003 < rms_error(logits(decoder), expected) < bound


@pytest.mark.parametrize("tied", [False, True])
def test_head(full: Path, tmp_path: Path, tied: bool) -> None:
    source = make_full(tmp_path / "tied", tie_word_embeddings=True) if tied else full
    decoder = load(source, quantization="wint4", quantize_lm_head=True)
    (tmp_path / "held").mkdir()
    held = dequantised(source, tmp_path / "held", "wint4", 128, head=True)
    config = json.loads((held / "config.json").read_text())
    (held / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert rms_error(logits(decoder), logits(load(held))) < 1e-5


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("method", ["wint8", "w8a8_int8", "wint4", "w4a8_fp8"])
def test_planned_bytes(full: Path, tmp_path: Path, method: str, head: bool, tied: bool) -> None:
    config = json.loads((full / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    model = ModelConfig(
        model=str(tmp_path), device="cpu", dtype="bfloat16", load_format="dummy", quantization=method,
        quantize_lm_head=head,
    )  # fmt: skip
    decoder = load_model(model)
    heads = (decoder.spec.lm_head,) if head else ()
    per_row = 0.5 + 4 / 128 if method in ("wint4", "w4a8_fp8") else 1
    expected = decoder.spec.num_parameters * 2
    for linear in (*decoder.spec.layer_linears, *heads):
        counters = 4 * -(-linear.out_features // 16) if method == "w8a8_int8" else 0
        scales = 0 if per_row < 1 else 4 * linear.out_features + counters
        already = 0 if tied and linear in heads else 2 * linear.in_features * linear.out_features
        expected += int(per_row * linear.in_features * linear.out_features) + scales - already
    assert weight_bytes(model, decoder.spec, torch.bfloat16) == expected
    assert logits(decoder).std() > 0.3


def test_engine_serves_them(demo_model: Path) -> None:
    """With a head of its own, quantised too, in place of the tied table."""
    prompts = ["def read_file(path):\n", "import os\n\n\nclass Stack:\n    def __init__(self", "for i in range("]
    params = SamplingParams(max_tokens=12, temperature=0.0)
    fields = {"quantization": "wint4", "quantization_group_size": 64, "quantize_lm_head": True}
    with LLM(str(demo_model), device="cpu", num_blocks=64, **fields) as llm:
        texts = [completion.text for completion in llm.generate(prompts, params)]
        assert texts == [llm.generate(prompt, params)[0].text for prompt in prompts]
    assert all(text.strip() for text in texts)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"quantization": "wint8", "quantization_group_size": 64},
            "group_size=64: wint8 has no groups.*wint4",
        ),
        ({"quantization_group_size": 128}, "none has no groups"),
        ({"quantize_lm_head": True}, "quantize_lm_head.*needs a quantization"),
    ],
)
def test_wishes_without_a_use(full: Path, fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(full, **fields)


def test_group_sizes_are_words_of_the_table(full: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantization_group_size.*one of 0, -1, 32, 64, 128"):
        config_from_values({"model": str(full), "quantization": "wint4", "quantization_group_size": 48})


def test_sizes_that_groups_do_not_divide(full: Path, tmp_path: Path) -> None:
    config = json.loads((full / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 320}))
    with pytest.raises(ConfigError, match="=128: down has 320 inputs, not a multiple of 128; accepted here: 32, 64"):
        load(tmp_path, quantization="w4a8_fp8", load_format="dummy")
    load(tmp_path, quantization="w4a8_fp8", quantization_group_size=64, load_format="dummy")
