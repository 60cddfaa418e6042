"""A small model of Llama's kind that drafts, trained from the large one's probabilities (distillation).

It has the first rows of the large model's vocabulary: byte-pair tokens are numbered in the order of their merges, so
the first are the frequent ones. It reads any other token as its last row, as the engine gives it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_heads.layer import Attention, FeedForward, RMSNorm, rope_theta
from draft_heads.teacher import Lesson, Teacher

EMBEDDING_RMS = 0.05  # at the start: logits of a normed state are then below 1


@dataclass(frozen=True)
class DraftShape:
    """Sizes of the draft, by the names of config.json. hidden_size: at most the large model's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 64


@dataclass(frozen=True)
class _LayerConfig:
    """What `Attention` and `FeedForward` read of a config."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float


class Layer(nn.Module):
    def __init__(self, shape: DraftShape, theta: float, eps: float) -> None:
        super().__init__()
        size = shape.hidden_size
        config = _LayerConfig(size, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, theta)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.self_attn = Attention(config, size)
        self.mlp = FeedForward(config, shape.intermediate_size)
        for projection in (self.self_attn.o_proj, self.mlp.down_proj):  # a layer begins as the identity
            nn.init.zeros_(projection.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), [])
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftModel(nn.Module):
    """Embedding and head are one matrix; it begins as the large model's, projected to its strongest directions."""

    def __init__(self, teacher: Teacher, shape: DraftShape) -> None:
        super().__init__()
        eps = teacher.config.rms_norm_eps
        self.shape = shape
        self.vocabulary = torch.arange(shape.vocab_size)
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            Layer(shape, rope_theta(teacher.config), eps) for _ in range(shape.num_hidden_layers)
        )
        self.norm = RMSNorm(shape.hidden_size, eps)
        with torch.no_grad():
            rows = teacher.network.model.embed_tokens.weight[: shape.vocab_size].float()
            directions = torch.linalg.eigh(rows.T @ rows).eigenvectors[:, -shape.hidden_size :]
            projected = rows @ directions
            self.embed_tokens.weight.copy_(projected * (EMBEDDING_RMS / projected.square().mean().sqrt()))

    def forward(self, lesson: Lesson, num_steps: int) -> list[Tensor]:
        """One position: what it says after token i + 1 stands in row i."""
        x = self.embed_tokens(lesson.tokens.clamp(max=self.shape.vocab_size - 1))
        for layer in self.layers:
            x = layer(x)
        return [F.linear(self.norm(x[:, 1:]), self.embed_tokens.weight)]

    def config(self, model: dict[str, Any]) -> dict[str, Any]:
        """config.json: the model's with these sizes."""
        return {**model, **asdict(self.shape), "tie_word_embeddings": True, "dtype": "bfloat16"}

    def checkpoint(self) -> dict[str, Tensor]:
        return {f"model.{name}": value for name, value in self.state_dict().items()}
