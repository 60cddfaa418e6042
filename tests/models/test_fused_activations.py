"""Gemma's gelu and capped logits, Granite's scaled ones: as Hugging Face computes them, by our kernels alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from slipstream.core.config import ModelConfig
from slipstream.nn.load import load_model
from slipstream.nn.mlp import MLP
from slipstream_kernels.norm import gated_mul, gated_mul_fp8
from slipstream_kernels.sample import scale_logits
from slipstream_kernels.select import select
from tiny_checkpoints import make_checkpoint, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # Triton-lang's kernels, compiled there and interpreted here
SIZES = {"head_dim": 64, "hidden_size": 96, "intermediate_size": 128}


def refuse(*_: object, **__: object) -> torch.Tensor:
    raise AssertionError("a kernel of torch")


@pytest.fixture
def fused_alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Sends ops to Triton-lang's kernels; those of torch that compute the same raise."""

    def select_triton(op: str, backend: str, x: torch.Tensor) -> object:
        assert backend == "auto"
        return select(op, "triton", x)

    for module in (gated_mul, gated_mul_fp8, scale_logits):
        monkeypatch.setattr(module, "select", select_triton)
    return monkeypatch


def refuse_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "gelu", refuse)
    monkeypatch.setattr(torch, "tanh", refuse)
    monkeypatch.setattr(torch.Tensor, "tanh", refuse)
    monkeypatch.setattr(torch.Tensor, "tanh_", refuse)


@pytest.mark.parametrize("quantization", ["none", "fp8", "wint8"])
@pytest.mark.parametrize("variant", ["gemma2", "gemma3"])
def test_the_mlp_of_gemma(variant: str, quantization: str, tmp_path: Path, fused_alone: pytest.MonkeyPatch) -> None:
    """Quantised, as torch's activation between the same two products: a rounding of FP8 may fall to the other side."""
    if DEVICE == "cuda" and quantization == "fp8":
        pytest.skip("FP8 products on a GPU give bf16")
    checkpoint = make_checkpoint(variant, tmp_path, **SIZES)
    decoder = load_model(ModelConfig(model=str(tmp_path), device=DEVICE, quantization=quantization))
    mlp = decoder.layers[0].mlp
    assert isinstance(mlp, MLP) and mlp.spec.activation == "gelu_tanh"
    hidden = torch.randn(9, 96)
    with torch.no_grad():
        exact = checkpoint.model.model.layers[0].mlp(hidden)
    gate, up = mlp.gate_up(hidden.to(DEVICE)).chunk(2, dim=-1)
    apart = mlp.down(F.gelu(gate, approximate="tanh") * up)
    refuse_torch(fused_alone)
    ours = mlp(mlp.activation_quant.cast(hidden.to(DEVICE)))
    assert relative_error(ours, apart) < (5e-3 if quantization == "fp8" else 1e-5)
    assert relative_error(ours.cpu(), exact) < (1e-5 if quantization == "none" else 0.1)


@pytest.mark.parametrize("variant", ["gemma2", "granite"])
def test_scaled_logits(variant: str, tmp_path: Path, fused_alone: pytest.MonkeyPatch) -> None:
    """The head has no other pass over them."""
    checkpoint = make_checkpoint(variant, tmp_path, **(SIZES if variant == "gemma2" else {}))
    decoder = load_model(ModelConfig(model=str(tmp_path), device=DEVICE))
    hidden = torch.randn(9, decoder.spec.hidden_size)
    with torch.no_grad():
        logits = checkpoint.model.lm_head(hidden)
    plain = relative_error(logits, expected := _scaled(logits, checkpoint.model.config))
    refuse_torch(fused_alone)
    ours = decoder.raw_logits(hidden.to(DEVICE)).cpu()
    assert ours.dtype == torch.float32
    assert relative_error(ours, expected) < 1e-5 < plain


def _scaled(logits: torch.Tensor, config: object) -> torch.Tensor:
    """As Hugging Face's models do with what their head gives."""
    cap = getattr(config, "final_logit_softcapping", None)
    return logits / config.logits_scaling if cap is None else torch.tanh(logits / cap) * cap
