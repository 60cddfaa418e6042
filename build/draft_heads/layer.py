"""One layer of Llama's kind with the attention of drafting: to real tokens, and to its own branch of drafts.

The first pass is causal. In pass j, the draft that began at token i attends to the first pass's keys up to i and those
of its own earlier passes. Source: EAGLE-3's training-time test, arXiv:2503.01840.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """num_inputs: input features of the q, k and v projections. Grouped queries, rotary positions."""

    def __init__(self, config: object, num_inputs: int) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads  # type: ignore[attr-defined]
        size = config.hidden_size  # type: ignore[attr-defined]
        self.head_dim: int = getattr(config, "head_dim", None) or size // heads
        self.num_groups = heads // kv_heads
        self.theta = rope_theta(config)
        self.q_proj = nn.Linear(num_inputs, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(num_inputs, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(num_inputs, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, size, bias=False)

    def forward(self, x: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x: [batch, tokens, num_inputs]. earlier: keys and values of earlier passes; this pass's are appended."""
        batch, tokens, _ = x.shape
        q, k, v = (
            proj(x).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        positions = torch.arange(tokens, device=x.device) + len(earlier)
        q, k = rotate(q, positions, self.theta), rotate(k, positions, self.theta)
        earlier.append((k.repeat_interleave(self.num_groups, dim=1), v.repeat_interleave(self.num_groups, dim=1)))
        if len(earlier) == 1:
            out = F.scaled_dot_product_attention(q, *earlier[0], is_causal=True)
        else:
            out = self._attend(q, earlier)
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))

    def _attend(self, q: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        tokens, scale = q.shape[2], self.head_dim**-0.5
        first_k, first_v = earlier[0]
        scores = q @ first_k.transpose(-1, -2) * scale
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        own = [(q * k).sum(-1, keepdim=True) * scale for k, _ in earlier[1:]]
        weights = torch.cat([scores.masked_fill(future, float("-inf")), *own], dim=-1).float().softmax(-1).to(q.dtype)
        out = weights[..., :tokens] @ first_v
        for place, (_, v) in enumerate(earlier[1:]):
            out = out + weights[..., tokens + place, None] * v
        return out


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: object, inner: int) -> None:
        super().__init__()
        size = config.hidden_size  # type: ignore[attr-defined]
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rope_theta(config: object) -> float:
    """rope_theta of a config: transformers 5 has it in rope_parameters, transformers 4 at the top level."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", 10000.0))


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x: [batch, heads, tokens, head_dim]; halves rotated, as in Hugging Face's Llama."""
    exponents = torch.arange(0, x.shape[-1], 2, device=x.device).float() / x.shape[-1]
    angles = torch.outer(positions.float(), theta**-exponents)
    cos, sin = (torch.cat((part, part), dim=-1).to(x.dtype) for part in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
