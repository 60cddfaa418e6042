"""Means of keys for checkpoints of random weights, so large that another layer's or head's round very differently."""

from __future__ import annotations

from pathlib import Path

import torch
from slipstream.nn.key_means import FILE, write_key_means
from slipstream.nn.read_spec import read_spec


def draw_key_means(folder: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = [(layer.attention.num_kv_heads, layer.attention.head_dim) for layer in read_spec(folder).layers]
    write_key_means(folder / FILE, [20 * torch.randn(shape, generator=generator) for shape in shapes], {})
