"""Norm (optional) and rotary embedding of query and key heads.  Plain data."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rope:
    """cos_sin: [max_pos, rotary_dim] fp32, cos half then sin half; the first rotary_dim elements of a head are rotated.

    Pairs are (i, i + rotary_dim/2) (GPT-NeoX, Llama), or (2i, 2i+1) if interleaved (GPT-J, ChatGLM).
    Source: RoFormer, arXiv:2104.09864.
    """

    cos_sin: torch.Tensor
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        return self.cos_sin.shape[1]


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm of every query and key head before its rotation, or after it.  q, k: [head_dim], dtype of the heads."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float
    after_rotation: bool = False


@dataclass(frozen=True)
class QKRope:
    """What a layer does to query and key heads before they meet: an optional norm; the rotation, None with ALiBi."""

    rope: Rope | None
    norms: HeadNorms | None = None
