"""Factors that build/quantize.py folds into the source of a product's inputs: the model's function stays the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from packed_text import make_packed_text
from quantise_tiny import quantise
from quantized_checkpoints import load, logits, rms_error
from tiny_checkpoints import make_checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build"))
from quantization.calibration import load_recorded, quantised_linears
from quantization.folding import fold, input_groups

VARIANTS = (
    "llama-biases",  # three query heads for each head of v
    "smollm3",  # layers without positions
    "mixtral",
    "qwen2-moe",  # a shared expert with a gate
    "glm4-moe",
    "deepseek-v2",  # latents
    "deepseek-v2-lite",
    "deepseek-v3",
    "glm4-moe-lite",
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_folding_changes_nothing(tmp_path: Path, variant: str) -> None:
    full = make_checkpoint(variant, tmp_path).path
    decoder = load_recorded(full, torch.device("cpu"), torch.float32)
    before = logits(decoder)
    for layer in decoder.layers:
        groups = input_groups(layer)
        assert {linear for group in groups for linear in group.linears} == set(quantised_linears(layer))
        for group in reversed(groups):
            first = group.linears[0].spec
            shape = (first.num_experts, first.in_features) if group.per_expert else (first.in_features,)
            fold(group, group.shared(torch.rand(shape) + 0.5))
    assert rms_error(logits(decoder), before) < 1e-5


def test_inputs_without_a_norm_before_them_are_not_scaled(tmp_path: Path) -> None:
    """OLMo's norms come after its products: factors are folded into v and up alone."""
    full = make_checkpoint("olmo2", tmp_path / "full").path
    layer = load_recorded(full, torch.device("cpu"), torch.float32).layers[0]
    assert [group.linears for group in input_groups(layer)] == [(layer.attention.o,), (layer.mlp.down,)]
    (tmp_path / "text").mkdir()
    text = make_packed_text(tmp_path / "text")
    quantise(full, text, tmp_path / "made", "--method", "w8a8_int8", "--algorithm", "smoothquant")
    assert 0.001 < rms_error(logits(load(tmp_path / "made")), logits(load(full))) < 0.05
