"""Tiny random checkpoints in Hugging Face layout, one per variant of each served family, and their reference logits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers as hf
from stored_layouts import LAYOUTS
from tiny_variants import GPU_VARIANTS, SIZES, VARIANTS, classes_of
from torch import Tensor


@dataclass(frozen=True)
class TinyCheckpoint:
    path: Path
    model: hf.PreTrainedModel

    def logits(self, token_ids: list[int]) -> Tensor:
        """Hugging Face's, in one pass: [num_tokens, vocab_size] float32."""
        with torch.no_grad():
            return self.model(torch.tensor([token_ids])).logits[0]


def make_model(variant: str, **sizes: object) -> hf.PreTrainedModel:
    family, changes = {**VARIANTS, **GPU_VARIANTS}[variant]
    config_class, model_class = classes_of(family)
    torch.manual_seed(sum(variant.encode()))
    return draw(model_class(config_class(**{**SIZES, **changes, **sizes})).eval())


def draw(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    """The same model with weights drawn anew."""
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *selection_biases(model)):
            if "norm" in name:
                parameter.normal_(1.0, 0.3)
            else:  # Hugging Face initialises biases to zero and logits near zero, which would hide errors
                parameter.normal_(0.0, 0.5 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    return model


def selection_biases(model: hf.PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Buffers that rank experts."""
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def make_checkpoint(variant: str, path: Path, max_shard_size: str = "1GB", **sizes: object) -> TinyCheckpoint:
    """sizes: fields of the config besides those of the variant."""
    model = make_model(variant, **sizes)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    family = {**VARIANTS, **GPU_VARIANTS}[variant][0]
    if family in LAYOUTS:
        LAYOUTS[family](path, model)
    return TinyCheckpoint(path, model)


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Largest difference over the largest magnitude; NaN if there is one anywhere."""
    return ((ours - reference).abs().max() / reference.abs().max()).item()
