"""Rotary position embedding: the cos/sin table of a RopeSpec, computed once per rope of a model on the host.

Source: RoFormer, arXiv:2104.09864; sources of the scalings are at their functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.layer_spec import AttentionSpec
from slipstream.nn.rope_spec import RopeSpec


class RopeTables:
    """The tables of a model's ropes on its device. num_positions: the longest sequence (tokens)."""

    def __init__(self, num_positions: int, device: torch.device) -> None:
        self._num_positions, self._device = num_positions, device
        self._made: dict[RopeSpec, ops.Rope] = {}
        self._scales: dict[RopeSpec, Tensor] = {}

    def of(self, spec: RopeSpec | None) -> ops.Rope | None:
        if spec is None:
            return None
        if spec not in self._made:
            is_planned = self._device.type == "meta"
            shape = (self._num_positions, spec.rotary_dim)
            table = torch.empty(shape, device="meta") if is_planned else cos_sin_cache(spec, self._num_positions)
            table = table.to(self._device)
            self._made[spec] = ops.Rope(table, spec.is_interleaved)
        return self._made[spec]

    def query_scales(self, spec: RopeSpec | None) -> Tensor | None:
        """[num_positions] float32: what a query at each position is multiplied by; None: all by 1."""
        if spec is None or not spec.query_beta or self._num_positions <= spec.query_length:
            return None
        if spec not in self._scales:
            periods = torch.arange(self._num_positions) // spec.query_length
            self._scales[spec] = (1 + spec.query_beta * periods.float().log1p()).to(self._device)
        return self._scales[spec]


def table_bytes(attentions: Iterable[AttentionSpec], num_positions: int) -> int:
    """Bytes of the tables that these layers share."""
    ropes = {attention.rope for attention in attentions if attention.rope is not None}
    return sum(4 * num_positions * rope.rotary_dim for rope in ropes)


def cos_sin_cache(spec: RopeSpec, num_positions: int) -> Tensor:
    """[num_positions, rotary_dim] float32 on the CPU: cos of the rotary_dim/2 angles, then their sin.

    Includes the attention factor (yarn, longrope). Row p depends only on p, not on the batch or the chunk.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    if spec.type == "dynamic":
        angles = positions[:, None] * _dynamic_frequencies(spec, num_positions)
    elif spec.type == "longrope":
        angles = torch.outer(positions, _longrope_frequencies(spec, num_positions))
    else:
        angles = torch.outer(positions, inverse_frequencies(spec))
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * spec.attention_factor


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """[rotary_dim / 2] float32, radians per position, for types with fixed frequencies."""
    frequencies = _frequencies(torch.tensor(spec.theta), spec.rotary_dim)
    if spec.type == "default":
        return frequencies
    if spec.type == "linear":
        return frequencies / spec.factor
    if spec.type == "llama3":
        return _llama3_frequencies(spec, frequencies)
    if spec.type == "yarn":
        return _yarn_frequencies(spec, frequencies)
    raise ValueError(f"rope type {spec.type!r} has no fixed frequencies")


def _frequencies(theta: Tensor, rotary_dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


def _dynamic_frequencies(spec: RopeSpec, num_positions: int) -> Tensor:
    """[num_positions, rotary_dim / 2]: NTK-aware scaling with the base that fits a sequence ending at each position.

    In the published method the base depends on the current sequence length. Keys are cached once, so here the length is
    the token's position + 1. This equals Hugging Face's decoding token by token, and its single pass too while the
    sequence is within max_position_embeddings (where nothing is scaled).
    """
    length = torch.arange(1, num_positions + 1, dtype=torch.float32)
    original = spec.original_max_position_embeddings
    stretch = spec.factor * length.clamp(min=original) / original - (spec.factor - 1)
    theta = spec.theta * stretch ** (spec.rotary_dim / (spec.rotary_dim - 2))
    return _frequencies(theta[:, None], spec.rotary_dim)


def _longrope_frequencies(spec: RopeSpec, num_positions: int) -> Tensor:
    """[rotary_dim / 2]: each divided by its own factor. Source: LongRoPE, arXiv:2402.13753.

    Hugging Face changes the factors when a sequence outgrows the original length, but not in cached keys. Here the
    longest sequence that may be served selects the factors once.
    """
    factors = spec.long_factors if num_positions > spec.original_max_position_embeddings else spec.short_factors
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    return 1.0 / (torch.tensor(factors) * spec.theta**exponents)  # in Hugging Face's order: the same bits


def _llama3_frequencies(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """Frequencies of long wavelengths are divided by `factor`, short ones kept, the rest blended. Source: Llama 3.1."""
    wavelengths = 2 * math.pi / frequencies
    original = spec.original_max_position_embeddings
    blend = (original / wavelengths - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)  # 0 beyond the long border, 1 below the short one
    return (1 - blend) * frequencies / spec.factor + blend * frequencies


def _yarn_frequencies(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """Features with more than beta_fast rotations over the original length are kept, below beta_slow divided by
    `factor`, with a ramp between. Source: YaRN, arXiv:2309.00071, section 3.2."""

    def feature_of(turns: float) -> float:
        """The (fractional) feature index with this number of rotations over the original length."""
        return spec.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    original = spec.original_max_position_embeddings
    low, high = feature_of(spec.beta_fast), feature_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    features = torch.arange(spec.rotary_dim // 2, dtype=torch.float32)
    ramp = ((features - low) / (high - low or 0.001)).clamp(0.0, 1.0)  # 0.001: one feature is both borders
    return frequencies / spec.factor * ramp + frequencies * (1 - ramp)
