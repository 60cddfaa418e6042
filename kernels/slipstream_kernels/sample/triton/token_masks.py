"""apply_token_masks in Triton-lang: a program for each block of tokens of a masked row.  It reads bits and writes what
these forbid, without reading logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.triton.step_kernel import step_kernel

BLOCK = 1024


@step_kernel
def _mask_kernel(logits_ptr, rows_ptr, bits_ptr, row_stride, vocab_size, num_words, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = token_ids // 32
    has_bit = (token_ids < vocab_size) & (words < num_words)
    row = tl.load(rows_ptr + index)
    bits = tl.load(bits_ptr + index * num_words + words, mask=has_bit, other=-1)
    is_forbidden = ((bits >> (token_ids % 32)) & 1) == 0
    tl.store(logits_ptr + row * row_stride + token_ids, float("-inf"), mask=has_bit & is_forbidden)


def apply_token_masks(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """See ops.apply_token_masks.  The number of rows is the grid's alone, so it compiles nothing anew."""
    vocab_size = logits.shape[1]
    _mask_kernel[(rows.shape[0], triton.cdiv(vocab_size, BLOCK))](
        logits, rows, bits, logits.stride(0), vocab_size, bits.shape[1], BLOCK=BLOCK, num_warps=4
    )
