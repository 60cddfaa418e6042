"""FP8 linear layers: quantised at load or stored so, refused by name where they cannot serve, close to bf16."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from paged_forward import PagedForward
from quantized_checkpoints import linear_names, store
from safetensors.torch import load_file
from slipstream import LLM, SamplingParams
from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.decoder import Decoder
from slipstream.nn.layer_spec import AttentionSpec, DenseSpec, LayerSpec, LinearSpec
from slipstream.nn.load import load_model, weight_bytes
from slipstream.nn.parallel import SINGLE
from slipstream.nn.read_spec import read_spec
from slipstream.tokenizer.tokenizer import TextTokenizer
from slipstream_kernels import ops
from tiny_checkpoints import relative_error
from transformers import Qwen2Config, Qwen2ForCausalLM

PROMPT = [5, 17, 3, 90, 44, 44, 2, 61]
E4M3 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]
DEEPSEEK = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def compressed_tensors(weights: dict[str, object], inputs: dict[str, object], **fields: object) -> dict[str, object]:
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {"targets": ["Linear"], "weights": {**common, **weights}, "input_activations": {**common, **inputs}}
    groups = {"group_0": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
        **fields,
    }


CHANNELS = compressed_tensors({"strategy": "channel"}, {"strategy": "token", "dynamic": True})
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every size a multiple of 128, biases on q, k and v, a head of its own."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name), 0.3 if parameter.dim() == 1 else parameter.shape[1] ** -0.5)
    path = tmp_path_factory.mktemp("full")
    model.save_pretrained(path)
    return path


def by_channel(tensors: Tensors) -> None:
    for name in linear_names(tensors):
        rows = ops.quantize_fp8(tensors[f"{name}.weight"])
        tensors |= {f"{name}.weight": rows.values, f"{name}.weight_scale": rows.scales}


def by_block(tensors: Tensors) -> None:
    for name in linear_names(tensors):
        values, scales = ops.quantize_fp8_blocks(tensors[f"{name}.weight"])
        tensors |= {f"{name}.weight": values, f"{name}.weight_scale_inv": scales}


def by_tensor(tensors: Tensors) -> None:
    """Static, as ModelOpt and AutoFP8 write it: scalars; the parts of qkv differ in theirs."""
    for number, name in enumerate(linear_names(tensors)):
        weight = tensors[f"{name}.weight"]
        scale = weight.abs().max() / 448
        tensors |= {f"{name}.weight": (weight / scale).to(E4M3), f"{name}.weight_scale": scale}
        tensors[f"{name}.input_scale"] = torch.tensor([0.01 + 0.001 * number])
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(())  # of a quantised cache: not used here


def load(path: Path, **fields: object) -> Decoder:
    return load_model(ModelConfig(model=str(path), device="cpu", **fields))  # type: ignore[arg-type]


def logits(decoder: Decoder) -> torch.Tensor:
    return PagedForward(decoder, [PROMPT]).run([len(PROMPT)])[0]


def rms_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours - reference).square().mean() / reference.square().mean()).sqrt().item()


@pytest.mark.parametrize("method", ["fp8", "block_wise_fp8"])
def test_quantised_at_load(checkpoint: Path, method: str) -> None:
    full, decoder = load(checkpoint), load(checkpoint, quantization=method)
    for linear in (linear for layer in decoder.layers for linear in layer.linears()):
        assert linear.weights["weight"].dtype == E4M3
    assert torch.is_tensor(decoder.lm_head.weights.get("packed", decoder.lm_head.weights.get("weight")))  # not FP8
    assert 0.01 < rms_error(logits(decoder), logits(full)) < 0.15
    assert torch.equal(logits(decoder), logits(load(checkpoint, quantization=method)))


@pytest.mark.parametrize("method", ["fp8", "block_wise_fp8"])
def test_chunks_and_neighbours_change_nothing(checkpoint: Path, method: str) -> None:
    decoder = load(checkpoint, quantization=method)
    whole = logits(decoder)
    together = PagedForward(decoder, [PROMPT, PROMPT[2:], [7] * 9], seed=3).run([3, 1])
    assert relative_error(together[0], whole) < 2e-2  # a sum rounded otherwise may move an activation by one step


def test_stored_blocks_are_blocks_made_at_load(checkpoint: Path, tmp_path: Path) -> None:
    stored = load(store(checkpoint, tmp_path, DEEPSEEK, by_block))
    assert stored.spec.stored_format is not None
    assert torch.equal(logits(stored), logits(load(checkpoint, quantization="block_wise_fp8")))
    assert torch.equal(logits(load(tmp_path, quantization="block_wise_fp8")), logits(stored))


def _their_weight(linear: torch.nn.Module) -> torch.Tensor:
    """Where a GPU is, transformers keeps the blocks as they are stored."""
    if linear.weight.dtype != torch.float8_e4m3fn:
        return linear.weight
    rows, columns = linear.weight.shape
    scales = linear.weight_scale_inv.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return linear.weight.float() * scales


@pytest.mark.skipif(find_spec("accelerate") is None, reason="transformers reads this format with accelerate only")
def test_transformers_reads_the_same_blocks(checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    decoder = load(store(checkpoint, tmp_path, DEEPSEEK, by_block))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).model.layers[0].self_attn
    weight = torch.cat([_their_weight(linear) for linear in (theirs.q_proj, theirs.k_proj, theirs.v_proj)])
    bias = torch.cat([theirs.q_proj.bias, theirs.k_proj.bias, theirs.v_proj.bias])
    torch.testing.assert_close(decoder.layers[0].attention.qkv(torch.eye(128)), weight.t() + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantization", [CHANNELS, FBGEMM], ids=["compressed-tensors", "FBGEMM"])
def test_stored_channels(checkpoint: Path, tmp_path: Path, quantization: dict[str, object]) -> None:
    stored, made = load(store(checkpoint, tmp_path, quantization, by_channel)), load(checkpoint, quantization="fp8")
    assert torch.equal(logits(stored), logits(made))


@pytest.mark.parametrize(
    "quantization",
    [
        STATIC,
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        compressed_tensors({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}),
    ],
)
def test_stored_tensors_with_static_inputs(checkpoint: Path, tmp_path: Path, quantization: dict[str, object]) -> None:
    decoder = load(store(checkpoint, tmp_path, quantization, by_tensor))
    tensors = load_file(tmp_path / "model.safetensors")
    names = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    scale = torch.stack([tensors[f"{name}.input_scale"] for name in names]).max()
    x = torch.randn(5, 128)
    seen = (x / scale).clamp(-448, 448).to(E4M3).float() * scale
    weight = torch.cat([tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"] for name in names])
    bias = torch.cat([tensors[f"{name}.bias"] for name in names])
    torch.testing.assert_close(decoder.layers[0].attention.qkv(x), seen @ weight.t() + bias, rtol=1e-2, atol=1e-2)
    assert logits(decoder).isfinite().all()


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_tensors_under_transformers_names(checkpoint: Path, tmp_path: Path, scheme: str) -> None:
    """Ministral 3 is published so, with a weight_block_size of null; AutoFP8 has other names and no such field."""
    autofp8 = {**STATIC, "activation_scheme": scheme}

    def own(tensors: Tensors, weight: str = "weight_scale", inputs: str = "input_scale") -> None:
        by_tensor(tensors)
        for module in linear_names(tensors):
            tensors[f"{module}.{weight}"] = tensors.pop(f"{module}.weight_scale")
            scale = tensors.pop(f"{module}.input_scale")
            tensors |= {f"{module}.{inputs}": scale} if scheme == "static" else {}

    expected = logits(load(store(checkpoint, tmp_path, autofp8, own)))
    renamed = partial(own, weight="weight_scale_inv", inputs="activation_scale")
    ours = logits(load(store(checkpoint, tmp_path, {**autofp8, "weight_block_size": None}, renamed)))
    assert torch.equal(ours, expected)
    assert rms_error(ours, logits(load(checkpoint))) < 0.3


def test_head_that_is_stored_quantised(checkpoint: Path, tmp_path: Path) -> None:
    def with_head(tensors: Tensors) -> None:
        by_channel(tensors)
        rows = ops.quantize_fp8(tensors["lm_head.weight"])
        tensors |= {"lm_head.weight": rows.values, "lm_head.weight_scale": rows.scales}

    decoder = load(store(checkpoint, tmp_path, {**CHANNELS, "ignore": []}, with_head))
    assert decoder.lm_head.weights["weight"].dtype == E4M3
    assert 0.01 < rms_error(logits(decoder), logits(load(checkpoint))) < 0.15


Q, K = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(f"{Q}.weight_scale_inv"), f"tensor {Q}.weight_scale_inv missing"),
        (lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(2, 1)}), r"has shape \[2, 1\], .* implies \[1"),
        (lambda t: t.update({f"{K}.weight": torch.ones(128, 128)}), f"{K}.weight has type F32; accepted: F8_E4M3"),
        (lambda t: t.update({f"{K}.input_scale": torch.ones(1)}), f"{K}.input_scale unexpected"),
    ],
)
def test_broken_checkpoint_is_named(checkpoint: Path, tmp_path: Path, change: Callable[..., None], named: str) -> None:
    def broken(tensors: Tensors) -> None:
        by_block(tensors)
        change(tensors)

    with pytest.raises(ConfigError, match=named):
        load(store(checkpoint, tmp_path, DEEPSEEK, broken))


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes'.*awq, gptq, fp8, compressed-tensors, modelopt"),
        ({**DEEPSEEK, "weight_block_size": [64, 64]}, "weight_block_size=.*128"),
        ({**DEEPSEEK, "activation_scheme": "static"}, "weight_block_size=.*dynamic"),
        ({**CHANNELS, "ignore": ["re:.*up_proj"]}, "ignore=.*leaves model.layers.0.mlp.up_proj"),
        ({**CHANNELS, "format": "pack-quantized"}, "format='pack-quantized'"),
        ({**CHANNELS, "config_groups": {}}, "config_groups"),
        (compressed_tensors({"strategy": "channel", "num_bits": 4}, {"strategy": "token"}), "num_bits=4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4'"),
    ],
)
def test_unserved_format_is_refused(checkpoint: Path, tmp_path: Path, stored: dict[str, object], named: str) -> None:
    store(checkpoint, tmp_path, stored, lambda tensors: None)
    with pytest.raises(ConfigError, match=named):
        read_spec(tmp_path)


def test_wishes_that_cannot_be_served(checkpoint: Path, tmp_path: Path) -> None:
    store(checkpoint, tmp_path, DEEPSEEK, by_block)
    for wish in ("fp8", "none"):
        with pytest.raises(ConfigError, match=f"quantization='{wish}': the checkpoint is stored in block_wise_fp8"):
            load(tmp_path, quantization=wish)


def test_sizes_that_blocks_do_not_divide(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    for field, named in (({"intermediate_size": 320}, "gate has 320 outputs"), ({"hidden_size": 96}, "96 inputs")):
        (tmp_path / "config.json").write_text(json.dumps({**config, **field}))
        with pytest.raises(ConfigError, match=f"block_wise_fp8.*{named}, not a multiple of 128"):
            load(tmp_path, quantization="block_wise_fp8", load_format="dummy")


@pytest.mark.parametrize("method", ["none", "fp8", "block_wise_fp8"])
def test_planned_bytes_are_held_bytes(checkpoint: Path, method: str) -> None:
    config = ModelConfig(model=str(checkpoint), device="cpu", quantization=method, load_format="dummy")
    decoder = load_model(config)
    planned = weight_bytes(config, decoder.spec, torch.bfloat16)
    padded = SINGLE.vocabulary_width(decoder.spec.vocab_size)
    expected = replace(decoder.spec, vocab_size=padded).num_parameters * 2
    for linear in decoder.spec.layer_linears if method != "none" else ():
        rows, columns = linear.out_features, linear.in_features
        scales = -(-rows // 128) * 4 if method == "block_wise_fp8" else rows
        expected += 4 * scales + 4 * -(-rows // 16) - rows * columns
    assert planned == expected
    assert logits(decoder).std() > 0.3


def test_an_eight_billion_model_is_planned_with_half_the_bytes(checkpoint: Path) -> None:
    large = replace(
        read_spec(checkpoint), hidden_size=4096, vocab_size=128256,
        layers=(LayerSpec(AttentionSpec(4096, 4096, 32, 8, 128, None), DenseSpec(4096, 14336)),) * 32,
    )  # fmt: skip
    linears = sum(LinearSpec.num_parameters.fget(linear) for linear in large.layer_linears)  # type: ignore[attr-defined]
    full = large.weight_bytes(torch.bfloat16)
    held = weight_bytes(ModelConfig(quantization="fp8"), large, torch.bfloat16)
    assert full - held == pytest.approx(linears, rel=2e-3)  # a byte per parameter, but for the scales


def test_demo_model_stays_close_to_full_precision(demo_model: Path) -> None:
    """e4m3 keeps 3 bits of fraction: 2.6 % of noise per factor, which a model of 384 features averages over little."""
    text = Path(json.__file__).read_text()
    token_ids = [0, *TextTokenizer.load(demo_model).encode(text)[:400]]

    def log_probs(method: str) -> torch.Tensor:
        decoder = load(demo_model, quantization=method)
        return PagedForward(decoder, [token_ids], block_size=64).run([len(token_ids)])[0].log_softmax(-1)

    full = log_probs("none")
    targets = torch.tensor(token_ids[1:])
    for method in ("fp8", "block_wise_fp8"):
        ours = log_probs(method)
        divergence = (full.exp() * (full - ours)).sum(-1).mean().item()
        loss = [torch.nn.functional.nll_loss(rows[:-1], targets).item() for rows in (full, ours)]
        assert 1e-4 < divergence < 0.03
        assert math.exp(loss[1] - loss[0]) < 1.02


def test_engine_serves_quantised(demo_model: Path) -> None:
    prompts = ["def read_file(path):\n", "import os\n\n\nclass Stack:\n    def __init__(self", "for i in range("]
    params = SamplingParams(max_tokens=16, temperature=0.0)
    with LLM(str(demo_model), device="cpu", num_blocks=64, quantization="fp8") as llm:
        texts = [completion.text for completion in llm.generate(prompts, params)]
        assert texts == [llm.generate(prompt, params)[0].text for prompt in prompts]
    assert all(text.strip() for text in texts)
