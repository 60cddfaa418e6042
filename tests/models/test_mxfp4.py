"""gpt-oss as it is published: experts in MXFP4, other weights in bf16; and weights rounded to MXFP4 at load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paged_forward import PagedForward
from rank_threads import on_each, parallels
from safetensors.torch import load_file, save_file
from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.load import load_model
from slipstream.nn.quant.mxfp4 import RoundedToMXFP4
from slipstream.nn.read_spec import read_spec
from slipstream_kernels import ops
from slipstream_kernels.gemm.quantize_int4 import dequantize_int4
from slipstream_kernels.moe.grouped_mxfp4_layout import repack_experts
from tiny_checkpoints import TinyCheckpoint, draw, relative_error
from tiny_variants import SIZES, VARIANTS
from transformers import GptOssConfig, GptOssForCausalLM

PROMPT = [(7 * position) % 89 + 3 for position in range(29)]
LEFT_OUT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.fixture
def checkpoint(tmp_path: Path) -> TinyCheckpoint:
    """Random codes and scales; Hugging Face's model has what they stand for, number by number."""
    torch.manual_seed(1)
    changes = {"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 32}
    model = draw(GptOssForCausalLM(GptOssConfig(**{**SIZES, **VARIANTS["gpt-oss"][1], **changes})).eval())
    packed = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = parameter.shape
            codes = torch.randint(0, 16, (experts, rows, columns // 32, 32), dtype=torch.uint8)
            scales = torch.randint(119, 125, (experts, rows, columns // 32), dtype=torch.uint8)
            packed[f"{name}_blocks"] = codes[..., 0::2] + 16 * codes[..., 1::2]
            packed[f"{name}_scales"] = scales
            values = torch.tensor(VALUES)[codes.long()] * 2.0 ** (scales[..., None].float() - 127)
            parameter.data.copy_(values.flatten(-2).transpose(1, 2))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    plain = {name: tensor for name, tensor in load_file(file).items() if f"{name}_blocks" not in packed}
    save_file({**plain, **packed}, file)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": LEFT_OUT}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return TinyCheckpoint(tmp_path, model)


def test_logits(checkpoint: TinyCheckpoint) -> None:
    decoder = load_model(ModelConfig(model=str(checkpoint.path), device="cpu"))
    for chunks in ([29], [1, 7]):
        (ours,) = PagedForward(decoder, [PROMPT]).run(chunks)
        assert relative_error(ours, checkpoint.logits(PROMPT)) <= 1e-4


def test_ranks_have_whole_experts(checkpoint: TinyCheckpoint) -> None:
    """With their biases, where an expert of 32 features cannot be cut. Some experts get no rows, and some ranks."""
    config = ModelConfig(model=str(checkpoint.path), device="cpu")
    ranks = [load_model(config, parallel=replace(one, splits_experts=True)) for one in parallels(2)]
    prompts = [PROMPT, [9], [4]]
    found = on_each(ranks, lambda decoder: torch.cat(PagedForward(decoder, prompts).run([7, 1])))
    expected = torch.cat(PagedForward(load_model(config), prompts).run([7, 1]))
    assert torch.equal(*found) and relative_error(found[0], expected) < 1e-5


def test_experts_stay_in_4_bits(checkpoint: TinyCheckpoint) -> None:
    decoder = load_model(ModelConfig(model=str(checkpoint.path), device="cpu"))
    stored = load_file(checkpoint.path / "model.safetensors")
    held = [linear.weights for layer in decoder.layers for linear in layer.linears() if "scales" in linear.weights]
    num_bytes = sum(weights[name].nbytes for weights in held for name in ("packed", "scales"))
    assert num_bytes == sum(tensor.nbytes for name, tensor in stored.items() if name.endswith(("_blocks", "_scales")))
    assert all("weight" not in weights for weights in held)


def test_formats_and_what_is_refused(checkpoint: TinyCheckpoint) -> None:
    spec = read_spec(checkpoint.path)
    assert spec.stored_format is None and spec.expert_format is not None and spec.expert_format.method == "mxfp4"
    file = checkpoint.path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.experts.down_proj_scales"][0, 3, 0] = 161
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"down_proj_scales has a scale above 2\^33"):
        load_model(ModelConfig(model=str(checkpoint.path), device="cpu"))


def test_experts_are_held_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Linear keeps what it multiplies, and sleep frees that. The canonical tensors stayed too: twice the memory."""
    monkeypatch.setattr(ops, "repack_expert_int4", repack_experts)  # a CPU keeps the canonical order
    method, spec = RoundedToMXFP4(), LinearSpec(64, (("up", 4 * 32),), bias=True, num_experts=4)
    weights = method.create_weights(spec, torch.device("cpu"), torch.bfloat16)
    method.load(weights, "weight", slice(0, 128), torch.randn(128, 64))
    multiplied = method.finish(weights, 4, torch.bfloat16)
    assert multiplied.kind.format == "grouped_mxfp4"
    held = {**multiplied.int4.tensors(), "bias": multiplied.bias}
    assert weights.keys() == held.keys() and all(weights[name] is tensor for name, tensor in held.items())


def test_dummy_weights(checkpoint: TinyCheckpoint) -> None:
    decoder = load_model(ModelConfig(model=str(checkpoint.path), device="cpu", load_format="dummy"))
    (logits,) = PagedForward(decoder, [PROMPT]).run([16])
    assert logits.isfinite().all()


def test_rounding_is_to_the_nearest_value() -> None:
    method, spec = RoundedToMXFP4(), LinearSpec(64, (("q", 8),))
    weights = method.create_weights(spec, torch.device("cpu"), torch.float32)
    weight = torch.randn(8, 64)
    weight[2, :32] = 0
    method.load(weights, "weight", slice(0, 8), weight)
    rounded = dequantize_int4(method.finish(weights).int4)
    for stored, wanted in zip(rounded.unflatten(1, (2, 32)).flatten(0, 1), weight.view(16, 32)):
        scale = 2.0 ** (torch.frexp(wanted.abs().max()).exponent - 3)
        table = torch.tensor(VALUES) * scale
        nearest = table[(wanted[:, None] - table).abs().argmin(dim=1)]
        assert torch.equal(stored.abs(), nearest.abs()) and torch.equal(stored, nearest.abs().copysign(wanted))
    with pytest.raises(ConfigError, match="40 input features are not a multiple of 32"):
        method.create_weights(LinearSpec(40, (("q", 8),)), torch.device("cpu"), torch.float32)
