"""top_logprobs in Triton-lang: one pass over the logits by many programs a row, then one program a row; no sort.

Pass one writes each chunk's normaliser and number of better tokens, and each group's largest logit.  Pass two re-reads
the groups with the k largest maxima, which contain the k best tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.sample.triton.token_groups import (
    Grouping,
    find_floor,
    listed,
    load_chunk,
    load_group_keys,
    load_groups,
    load_maxima,
    ordered,
    store_group_maxima,
    unordered,
)
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.step_kernel import step_kernel, two_tensors

# The best tokens are selected one by one; beyond this number torch.topk is as fast.
MAX_K = 128
NONE = tl.constexpr(-(1 << 63))


@triton.jit
def _logprob_chunk_kernel(
    logits_ptr, chosen_ptr, maxima_ptr, sums_ptr, num_better_ptr, group_maxima_ptr, row_stride, vocab_size,
    NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, HAS_TOP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, rows)."""
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits_row = logits_ptr + row * row_stride
    chosen = tl.load(logits_row + tl.load(chosen_ptr + row)).to(tl.float32)
    x, _ = load_chunk(logits_row, chunk, vocab_size, CHUNK, GROUP)
    maximum = tl.max(x)
    part = row * NUM_CHUNKS + chunk
    tl.store(maxima_ptr + part, maximum)
    # exp(-inf - -inf) is NaN: a chunk may hold forbidden tokens only.
    tl.store(sums_ptr + part, tl.sum(tl.exp(x - tl.where(maximum == float("-inf"), 0.0, maximum))))
    tl.store(num_better_ptr + part, tl.sum((x > chosen).to(tl.int32)))
    if HAS_TOP:
        store_group_maxima(x, group_maxima_ptr + row * (NUM_CHUNKS * CHUNK // GROUP), chunk)


@triton.jit
def _best_groups(keys, maximum, slots_ptr, K: tl.constexpr, CAPACITY: tl.constexpr):
    """[CAPACITY] groups with the k largest maxima, -1 pads; among equal ones, those that fit."""
    floor, count = find_floor(keys, ordered(maximum), K, CAPACITY)
    kept = keys >= floor
    tied = keys == tl.where(count < K, floor - 1, 0xFFFFFFFF)
    # both counts in one scan
    before = tl.cumsum(kept.to(tl.int32) + (tied.to(tl.int32) << 16), axis=0)
    indices = tl.where(kept, (before & 0xFFFF) - 1, count + (before >> 16) - 1)
    return listed(kept | tied, indices, slots_ptr, count + tl.sum(tied.to(tl.int32), axis=0), CAPACITY)


@step_kernel
def _logprob_row_kernel(
    logits_ptr, chosen_ptr, maxima_ptr, sums_ptr, num_better_ptr, group_maxima_ptr, slots_ptr, log_normaliser_ptr,
    logprob_ptr, rank_ptr, values_ptr, token_ids_ptr, row_stride, vocab_size,
    NUM_CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr,
    GROUP: tl.constexpr, CAPACITY: tl.constexpr, K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (rows)."""
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    parts, is_chunk, maxima, maximum = load_maxima(maxima_ptr, row, NUM_CHUNKS, CHUNKS_PADDED)
    sums = tl.load(sums_ptr + parts, mask=is_chunk, other=0.0)
    total = tl.sum(tl.where(maxima > float("-inf"), sums * tl.exp(maxima - maximum), 0.0), axis=0)
    log_normaliser = maximum + tl.log(total)
    logits_row = logits_ptr + row * row_stride
    chosen = tl.load(logits_row + tl.load(chosen_ptr + row)).to(tl.float32)
    tl.store(log_normaliser_ptr + row, log_normaliser)
    tl.store(logprob_ptr + row, chosen - log_normaliser)
    num_better = tl.sum(tl.load(num_better_ptr + parts, mask=is_chunk, other=0), axis=0)
    tl.store(rank_ptr + row, (num_better + 1).to(tl.int64))
    if K > 0:
        keys = load_group_keys(group_maxima_ptr + row * NUM_GROUPS, NUM_GROUPS, GROUPS_PADDED)
        groups = _best_groups(keys, maximum, slots_ptr + row * CAPACITY, K, CAPACITY)
        x, ids = load_groups(logits_row, groups, vocab_size, GROUP)
        # One number that orders by logit, then by lower id.
        packed = (ordered(x) ^ 0x80000000).to(tl.int32, bitcast=True).to(tl.int64) << 32
        packed = tl.where((groups >= 0)[:, None] & (ids < vocab_size), packed | (0x7FFFFFFF - ids).to(tl.int64), NONE)
        for index in range(K):
            best = tl.max(packed)
            packed = tl.where(packed == best, NONE, packed)
            value = unordered((best >> 32).to(tl.int32).to(tl.uint32, bitcast=True) ^ 0x80000000)
            tl.store(values_ptr + row * K + index, value - log_normaliser)
            tl.store(token_ids_ptr + row * K + index, 0x7FFFFFFF - (best & 0x7FFFFFFF))


def top_logprobs(
    logits: torch.Tensor, k: int, chosen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ops.top_logprobs."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    cut = Grouping.of(vocab_size)
    in_kernel = k if k <= MAX_K else 0
    maxima, sums = two_tensors(num_rows, cut.num_chunks, device=device)
    num_better = torch.empty(num_rows, cut.num_chunks, dtype=torch.int32, device=device)
    log_normaliser, logprob = two_tensors(num_rows, device=device)
    rank = torch.empty_like(chosen)
    values = torch.empty(num_rows, in_kernel, dtype=torch.float32, device=device)
    token_ids = torch.empty(num_rows, in_kernel, dtype=torch.int64, device=device)
    if num_rows:
        left = (maxima, sums, num_better, cut.maxima(logits) if in_kernel else maxima)
        size = (logits.stride(0), vocab_size)
        shape = {"NUM_CHUNKS": cut.num_chunks, "GROUP": cut.group, **dependent_launch(device)}
        _logprob_chunk_kernel[(cut.num_chunks, num_rows)](
            logits, chosen, *left, *size, CHUNK=cut.chunk, HAS_TOP=in_kernel > 0, num_warps=8, **shape
        )
        padded = triton.next_power_of_2(cut.num_groups)
        capacity = min(padded, max(64, 2 * triton.next_power_of_2(in_kernel)))
        slots = torch.empty(num_rows, capacity, dtype=torch.int32, device=device)
        results = (slots, log_normaliser, logprob, rank, values, token_ids)
        _logprob_row_kernel[(num_rows,)](
            logits, chosen, *left, *results, *size, CHUNKS_PADDED=triton.next_power_of_2(cut.num_chunks),
            NUM_GROUPS=cut.num_groups, GROUPS_PADDED=padded, CAPACITY=capacity, K=in_kernel,
            num_warps=8 if in_kernel else 1, **shape,
        )  # fmt: skip
    if k > in_kernel:
        best, token_ids = torch.topk(logits, k, dim=-1)
        values = best.float() - log_normaliser[:, None]
    return logprob, rank, values, token_ids
