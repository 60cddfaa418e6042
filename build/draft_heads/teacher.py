"""The frozen model that heads learn from: its hidden states and logits. Any Hugging Face decoder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Lesson:
    """The model's outputs on one batch. tokens: [batch, length] int64. hidden: final hidden states (normalised).

    features: the residual stream before three layers, concatenated. logits: [batch, length, vocab].
    """

    tokens: Tensor
    hidden: Tensor
    features: Tensor
    logits: Tensor


class Teacher:
    """bf16 on a GPU, float32 on a CPU. layers of Llama's kind: q_proj, k_proj, v_proj, o_proj and a gated MLP."""

    def __init__(self, model_dir: Path, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.network = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).to(device).eval()
        self.network.requires_grad_(False)
        self.config = self.network.config
        self.num_layers: int = self.config.num_hidden_layers

    @property
    def feature_layers(self) -> tuple[int, int, int]:
        """The low, middle and high layer of EAGLE-3."""
        return 2, self.num_layers // 2, self.num_layers - 3

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Lesson:
        out = self.network.model(tokens, output_hidden_states=True, use_cache=False)
        features = torch.cat([out.hidden_states[layer] for layer in self.feature_layers], dim=-1)
        hidden = out.last_hidden_state
        return Lesson(tokens, hidden, features, self.network.lm_head(hidden))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.network.model.embed_tokens(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        return self.network.lm_head(hidden)
