"""compact_kv in Triton-lang: one launch for all layers of a width, a program per request, tensor and head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from slipstream_kernels.triton.step_kernel import step_kernel

_NUM_WARPS = 1  # a row is at most some hundred bytes


def compact_kv(
    tensors: Sequence[torch.Tensor],
    addresses: torch.Tensor,
    row_bytes: int,
    sources: torch.Tensor,
    targets: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """See ops.compact_kv.  Copies rows as 32-bit words, or as bytes if their size is no multiple of 4."""
    num_heads, block_size = tensors[0].shape[1:3]
    has_words = row_bytes % 4 == 0
    width = row_bytes // 4 if has_words else row_bytes
    _move_kernel[(counts.shape[0], len(tensors) * num_heads)](
        addresses,
        sources,
        targets,
        counts,
        sources.shape[1],
        NUM_HEADS=num_heads,
        BLOCK_SIZE=block_size,
        HAS_WORDS=has_words,
        WIDTH=width,
        WIDTH_PADDED=triton.next_power_of_2(width),
        num_warps=_NUM_WARPS,
    )


@step_kernel
def _move_kernel(
    addresses,
    sources,
    targets,
    counts,
    most,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
):
    """A thread copies the same words of every slot in order, so a later copy may overwrite what an earlier one read."""
    request, index = tl.program_id(0), tl.program_id(1)
    base = tl.load(addresses + index // NUM_HEADS).to(tl.pointer_type(tl.int32 if HAS_WORDS else tl.int8))
    head = index % NUM_HEADS
    words = tl.arange(0, WIDTH_PADDED)
    for move in range(request * most, request * most + tl.load(counts + request)):
        source, target = tl.load(sources + move), tl.load(targets + move)
        is_move = words < tl.where(source == target, 0, WIDTH)
        source = ((source // BLOCK_SIZE) * NUM_HEADS + head) * BLOCK_SIZE + source % BLOCK_SIZE
        target = ((target // BLOCK_SIZE) * NUM_HEADS + head) * BLOCK_SIZE + target % BLOCK_SIZE
        row = tl.load(base + source * WIDTH + words, mask=is_move)
        tl.store(base + target * WIDTH + words, row, mask=is_move)
