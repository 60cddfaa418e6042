"""What every family can do beside computing Hugging Face's logits: dummy weights, and weights quantised at load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from paged_forward import PagedForward
from slipstream.core.config import ModelConfig
from slipstream.nn.load import load_model
from slipstream.nn.models import FAMILIES
from slipstream_kernels import ops
from tiny_checkpoints import make_checkpoint, relative_error
from tiny_variants import VARIANTS
from torch import Tensor

PROMPT = [(7 * position) % 89 + 3 for position in range(23)]
ONE_OF_EACH = {family: variant for variant, (family, _) in reversed(VARIANTS.items())}
# families with experts, or with parts that are stored as one
QUANTISED = (
    "baichuan",
    "chatglm",
    "deepseek-v3",
    "ernie4_5-moe",
    "glm4",
    "glm4-moe",
    "gpt-oss",
    "granite-hybrid",
    "granite-moe-shared",
    "minimax-m2",
    "olmoe",
    "phi3",
    "qwen2-moe",
    "qwen3-moe",
)


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_dummy_weights(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(ONE_OF_EACH[family], tmp_path).path
    (path / "model.safetensors").unlink()
    decoder = load_model(ModelConfig(model=str(path), device="cpu", load_format="dummy"))
    (logits,) = PagedForward(decoder, [PROMPT]).run([16])
    assert logits.isfinite().all() and 0.05 < logits.std().item() < 20


def test_a_router_s_bias_is_added_once_by_whoever_adds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the library multiplies: gpt-oss's product without the bias, then the choice with it."""
    checkpoint, biases = make_checkpoint("gpt-oss", tmp_path), []
    decoder = load_model(ModelConfig(model=str(checkpoint.path), device="cpu"))
    in_product = PagedForward(decoder, [PROMPT]).run([16])[0]

    def before_bias(x: Tensor, weight: ops.LinearWeight) -> tuple[Tensor, Tensor | None]:
        biases.append(weight.bias)
        return ops.linear(x, replace(weight, bias=None)), weight.bias

    monkeypatch.setattr(ops, "linear_before_bias", before_bias)
    in_choice = PagedForward(decoder, [PROMPT]).run([16])[0]
    assert biases and all(bias.abs().max() > 0 for bias in biases)
    assert relative_error(in_choice, in_product) < 1e-5
    assert relative_error(in_choice, checkpoint.logits(PROMPT)) < 1e-4


@pytest.mark.parametrize("family", QUANTISED)
def test_weights_quantised_at_load(family: str, tmp_path: Path) -> None:
    """int8 of a channel is within 1 % of the weights; what is fused or stacked comes apart before it is quantised."""
    checkpoint = make_checkpoint(ONE_OF_EACH[family], tmp_path)
    decoder = load_model(ModelConfig(model=str(checkpoint.path), device="cpu", quantization="wint8"))
    (logits,) = PagedForward(decoder, [PROMPT]).run([16])
    error = relative_error(logits, checkpoint.logits(PROMPT))
    assert 1e-4 < error < 0.15


def test_the_docs_name_every_architecture(root: Path) -> None:
    table = (root / "docs" / "models.md").read_text()
    assert [name for name in FAMILIES.names() if name not in table] == []
