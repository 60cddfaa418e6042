"""The demo model's network for training: Llama, with parameters named as in a Hugging Face checkpoint.

Plain PyTorch; for training only (no cache). Serving goes through slipstream's own decoder.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes of the network. num_kv_heads divides num_q_heads; head_dim is even."""

    vocab_size: int = 4096
    hidden_size: int = 384
    intermediate_size: int = 1024
    num_layers: int = 8
    num_q_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    max_tokens: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def to_hugging_face(self) -> dict[str, object]:
        """The config.json of the checkpoint."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_q_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_tokens,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


# Sizes by name: the demo model, and the small one that drafts for it.
PRESETS = {
    "demo": NetworkConfig(),
    "draft": NetworkConfig(hidden_size=256, intermediate_size=704, num_layers=2, num_q_heads=4),
}


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32.  Source: arXiv:1910.07467."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps).to(x.dtype)


def rope_tables(config: NetworkConfig) -> tuple[Tensor, Tensor]:
    """cos and sin, [max_tokens, head_dim] float32, halves repeated as Hugging Face's Llama rotates them."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angles = torch.outer(torch.arange(config.max_tokens).float(), config.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rope to x: [batch, heads, tokens, head_dim]; cos, sin: [tokens, head_dim].  Source: arXiv:2104.09864."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention over the whole window."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_groups = config.num_q_heads // config.num_kv_heads
        self.q_proj = nn.Linear(config.hidden_size, config.num_q_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_q_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            proj(x).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = k.repeat_interleave(self.num_groups, dim=1), v.repeat_interleave(self.num_groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))


class FeedForward(nn.Module):
    """SwiGLU.  Source: arXiv:2002.05202."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The stack under the names `embed_tokens`, `layers.N`, `norm`."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Network(nn.Module):
    """Llama for causal language modelling with tied embeddings; state_dict() has the checkpoint's names."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: NetworkConfig, residual_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.residual_dtype = residual_dtype
        self.model = Decoder(config)
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.initialise()

    def initialise(self) -> None:
        """Normal(0, 0.02); projections into the residual stream start at zero, so each layer starts as identity."""
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, token_ids: Tensor, target_ids: Tensor) -> Tensor:
        """Mean next-token cross-entropy in nats.  token_ids, target_ids: [batch, tokens] int64."""
        tokens = token_ids.shape[1]
        x = self.model.embed_tokens(token_ids).to(self.residual_dtype)
        cos, sin = self.cos[:tokens].to(x.dtype), self.sin[:tokens].to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        logits = F.linear(self.model.norm(x), self.model.embed_tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), target_ids.flatten())
