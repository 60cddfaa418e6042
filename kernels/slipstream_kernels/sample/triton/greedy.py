"""Greedy drawing in Triton-lang: one pass over the logits by many programs a row, then one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.sample.triton.sample_search import first_of_least, first_where
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents

CHUNK = 4096


@triton.jit
def _greedy_chunk_kernel(logits_ptr, maxima_ptr, winners_ptr, row_stride, vocab_size,
                         NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Grid (chunks, rows)."""
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    part = row * NUM_CHUNKS + chunk
    maximum = tl.max(x)
    tl.store(maxima_ptr + part, maximum)
    tl.store(winners_ptr + part, first_where(x == maximum, ids, vocab_size))


@triton.jit
def _greedy_row_kernel(maxima_ptr, winners_ptr, out_ptr, vocab_size,
                       NUM_CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Grid (rows)."""
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS_PADDED)
    maxima = tl.load(maxima_ptr + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=float("-inf"))
    winners = tl.load(winners_ptr + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=0)
    tl.store(out_ptr + row, first_of_least(-maxima, winners, vocab_size).to(tl.int64))


def greedy(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See ops.greedy."""
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device) if out is None else out
    if num_rows == 0:
        return token_ids
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    maxima = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    winners = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    launch = {"NUM_CHUNKS": num_chunks, **dependent_launch(logits.device)}
    _greedy_chunk_kernel[(num_chunks, num_rows)](
        logits, maxima, winners, logits.stride(0), vocab_size, CHUNK=CHUNK, num_warps=8, **launch
    )
    padded = triton.next_power_of_2(num_chunks)
    _greedy_row_kernel[(num_rows,)](maxima, winners, token_ids, vocab_size, CHUNKS_PADDED=padded, num_warps=1, **launch)
    return token_ids
