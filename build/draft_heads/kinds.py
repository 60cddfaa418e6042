"""Which kinds of drafters can be trained, and how one is made for a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draft_heads.draft import DraftModel, DraftShape
from draft_heads.heads import MTP, Eagle, Medusa
from draft_heads.teacher import Teacher

Head = Medusa | MTP | Eagle | DraftModel
KINDS = ("medusa", "mtp", "eagle", "draft")
HEAD_DIM = 64  # of a draft model


@dataclass(frozen=True)
class HeadsConfig:
    """kind: of KINDS. Ends at max_steps or max_seconds, whichever is first; the rates follow the nearer.

    num_heads, num_blocks: of Medusa. num_steps: drafts in a row that MTP and EAGLE are trained on. draft_vocab_size: of
    EAGLE (its most frequent tokens) and of a draft model (its first ones). intermediate_size: of EAGLE (0: as the
    model's) and of a draft model. hidden_size, num_layers: of a draft model.
    """

    kind: str
    model_dir: Path
    out_dir: Path
    state_path: Path | None = None
    max_seconds: float = 150.0
    max_steps: int = 1_000_000
    batch_windows: int = 64
    window_tokens: int = 512
    muon_lr: float = 0.01
    adam_lr: float = 0.001
    num_heads: int = 5
    num_blocks: int = 2
    num_steps: int = 4
    draft_vocab_size: int = 2048
    intermediate_size: int = 0
    hidden_size: int = 256
    num_layers: int = 2
    eval_windows: int = 256
    seed: int = 0
    tensorboard: Path | None = None

    @property
    def num_positions(self) -> int:
        """Drafts that follow one another in training."""
        return {"medusa": self.num_heads, "draft": 1}.get(self.kind, self.num_steps)


def build_head(config: HeadsConfig, teacher: Teacher, token_ids: Tensor) -> Head:
    """token_ids: of the training text, whose most frequent tokens an EAGLE head can draft.

    Raises ValueError for an MTP module of a model with latent attention, which it would share.
    """
    if config.kind == "medusa":
        return Medusa(teacher, config.num_heads, config.num_blocks)
    if config.kind == "mtp":
        if getattr(teacher.config, "kv_lora_rank", None):
            raise ValueError("mtp: modules with latent attention are not trained here; train eagle or medusa")
        return MTP(teacher)
    size = min(config.draft_vocab_size, teacher.config.vocab_size)
    if config.kind == "draft":
        return DraftModel(teacher, _draft_shape(config, size))
    counts = torch.bincount(token_ids.long(), minlength=teacher.config.vocab_size)
    return Eagle(teacher, counts.topk(size).indices.sort().values.cpu(), config.intermediate_size)


def _draft_shape(config: HeadsConfig, vocab_size: int) -> DraftShape:
    """Raises ValueError for a width that is no multiple of a head's."""
    num_heads, rest = divmod(config.hidden_size, HEAD_DIM)
    if rest or not num_heads:
        raise ValueError(f"hidden-size: {config.hidden_size} is no multiple of {HEAD_DIM}")
    inner = config.intermediate_size or 3 * config.hidden_size
    return DraftShape(vocab_size, config.hidden_size, inner, config.num_layers, num_heads, max(1, num_heads // 2))
