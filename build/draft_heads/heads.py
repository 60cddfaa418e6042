"""The kinds of heads as networks to train, with the tensor names of their checkpoints (the draft model: draft.py).

`forward(lesson, num_steps)` returns logits per draft position: row i of position j (from 0) predicts token i + 2 + j,
the model's output after token i + 1 + j. `vocabulary`: the tokens that the columns are; None: all of the model's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_heads.layer import Attention, FeedForward, RMSNorm
from draft_heads.teacher import Lesson, Teacher


def shifted(tokens: Tensor, count: int) -> Tensor:
    """Token i + count at index i; the end is padded with 0 and ignored by the loss."""
    return F.pad(tokens[:, count:], (0, count))


class MedusaHead(nn.Module):
    """Blocks x + SiLU(W x + b); the model's own vocabulary matrix reads them."""

    def __init__(self, size: int, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(num_layers))
        for block in self.blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.silu(block(x))
        return x


class Medusa(nn.Module):
    """num_layers blocks a head. Source: arXiv:2401.10774."""

    vocabulary: Tensor | None = None

    def __init__(self, teacher: Teacher, num_heads: int, num_layers: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(MedusaHead(teacher.config.hidden_size, num_layers) for _ in range(num_heads))
        self._read = [teacher.head]

    def forward(self, lesson: Lesson, num_steps: int) -> list[Tensor]:
        return [self._read[0](head(lesson.hidden).to(lesson.hidden.dtype)) for head in self.heads[:num_steps]]

    def config(self, model: dict[str, Any]) -> dict[str, Any]:
        """config.json of the checkpoint; model: that of the model."""
        return {"medusa_num_heads": len(self.heads), "medusa_num_layers": len(self.heads[0].blocks)}  # type: ignore[arg-type]

    def checkpoint(self) -> dict[str, Tensor]:
        """FasterDecoding's names, without a vocabulary matrix per head."""
        return {
            f"medusa_head.{index}.{layer}.linear.{part}": getattr(block, part)
            for index, head in enumerate(self.heads)
            for layer, block in enumerate(head.blocks)
            for part in ("weight", "bias")
        }


class MTP(nn.Module):
    """DeepSeek-V3's module around a layer of Llama's kind. Source: arXiv:2412.19437."""

    vocabulary: Tensor | None = None

    def __init__(self, teacher: Teacher) -> None:
        super().__init__()
        config, size = teacher.config, teacher.config.hidden_size
        self._teacher = [teacher]
        self.enorm, self.hnorm, self.norm, self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(size, config.rms_norm_eps) for _ in range(5)
        )
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.self_attn = Attention(config, size)
        self.mlp = FeedForward(config, config.intermediate_size)
        last = teacher.network.model.layers[-1].state_dict()
        own = {name: value.float() for name, value in last.items() if name in self.state_dict()}
        self.load_state_dict(own, strict=False)
        with torch.no_grad():
            self.norm.weight.copy_(teacher.network.model.norm.weight)

    def forward(self, lesson: Lesson, num_steps: int) -> list[Tensor]:
        teacher, hidden, earlier, found = self._teacher[0], lesson.hidden, [], []  # type: ignore[var-annotated]
        for step in range(num_steps):
            embedded = teacher.embed(shifted(lesson.tokens, step + 1))
            x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
            x = x + self.self_attn(self.input_layernorm(x), earlier)
            hidden = self.norm(x + self.mlp(self.post_attention_layernorm(x)))
            found.append(teacher.head(hidden.to(lesson.hidden.dtype)))
        return found

    def config(self, model: dict[str, Any]) -> dict[str, Any]:
        return {**model, "num_hidden_layers": 1}

    def checkpoint(self) -> dict[str, Tensor]:
        prefix = f"model.layers.{self._teacher[0].num_layers}."
        own = {name.replace("norm.weight", "shared_head.norm.weight") if name.startswith("norm.") else name: value
               for name, value in self.state_dict().items()}  # fmt: skip
        return {prefix + name: value for name, value in own.items()}


class Eagle(nn.Module):
    """EAGLE-3's head over the model's vocabulary, or its most frequent tokens. Source: arXiv:2503.01840.

    vocabulary: [draft_vocab] int64, ascending: the tokens that the head can draft. intermediate_size: of its MLP; 0: as
    the model's.
    """

    def __init__(self, teacher: Teacher, vocabulary: Tensor, intermediate_size: int = 0) -> None:
        super().__init__()
        config, size = teacher.config, teacher.config.hidden_size
        self._teacher = [teacher]
        self._vocab_size: int = config.vocab_size
        self.intermediate_size: int = intermediate_size or config.intermediate_size
        self.vocabulary: Tensor = vocabulary
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm, self.norm = (
            RMSNorm(size, config.rms_norm_eps) for _ in range(4)
        )
        self.self_attn = Attention(config, 2 * size)
        self.mlp = FeedForward(config, self.intermediate_size)
        self.lm_head = nn.Linear(size, len(vocabulary), bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(teacher.network.lm_head.weight[vocabulary.to(teacher.network.device)])

    def forward(self, lesson: Lesson, num_steps: int) -> list[Tensor]:
        teacher, earlier, found = self._teacher[0], [], []  # type: ignore[var-annotated]
        hidden = self.fc(lesson.features)
        for step in range(num_steps):
            embedded = self.input_layernorm(teacher.embed(shifted(lesson.tokens, step + 1)))
            hidden = hidden + self.self_attn(torch.cat([embedded, self.hidden_norm(hidden)], dim=-1), earlier)
            hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
            found.append(self.lm_head(self.norm(hidden)))
        return found

    def config(self, model: dict[str, Any]) -> dict[str, Any]:
        own = {"architectures": ["LlamaForCausalLMEagle3"], "intermediate_size": self.intermediate_size}
        return {**model, "num_hidden_layers": 1, **own, "draft_vocab_size": len(self.vocabulary)}

    def checkpoint(self) -> dict[str, Tensor]:
        layer = ("hidden_norm", "input_layernorm", "post_attention_layernorm", "self_attn", "mlp")
        named = {
            f"midlayer.{name}" if name.split(".")[0] in layer else name: value
            for name, value in self.state_dict().items()
        }
        places = torch.arange(len(self.vocabulary))
        is_chosen = torch.zeros(self._vocab_size, dtype=torch.bool)
        is_chosen[self.vocabulary] = True
        return {**named, "d2t": self.vocabulary - places, "t2d": is_chosen}
