"""Attention cases whose scores rise or fall along the keys by far more than a softmax's running maximum may lag behind.

A kernel whose maxima stay for too long, or whose sums do not follow them, has infinities or other results there.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from decode_cases import DecodeCase

RAMP = 8.0  # the first feature of keys goes from -RAMP to RAMP along a request
# Of the queries' first feature, as parts of the steepest: rows that a warp has side by side move at different tiles, or
# at none.
SLOPES = (1.0, 0.0, -1.0, 1 / 8, -1 / 64, 1 / 2, -1 / 8, 1 / 64, -1 / 2, 1 / 32, -1 / 3)


def steep(case: DecodeCase, steepest: float) -> DecodeCase:
    """The case with scores that rise by up to 2 * RAMP * steepest * scale from a request's first key to its last."""
    keys = case.key_cache.clone()
    block_size = keys.shape[2]
    for request, seq_len in enumerate(case.seq_lens.tolist()):
        place = torch.arange(seq_len)
        blocks = case.block_tables[request, place // block_size].long()
        ramp = torch.linspace(-RAMP, RAMP, seq_len)[:, None]
        keys[blocks, :, place % block_size, 0] = ramp.to(keys.dtype)
    q = case.q.clone()
    slopes = torch.tensor(SLOPES)[torch.arange(q[..., 0].numel()) % len(SLOPES)]
    q[..., 0] = (steepest * slopes).view(q.shape[:2]).to(q.dtype)
    return replace(case, q=q, key_cache=keys)
