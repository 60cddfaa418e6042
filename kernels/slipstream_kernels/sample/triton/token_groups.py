"""Finds a row's largest tokens without a sort, by groups of neighbouring tokens.

One pass over the logits writes each group's maximum.  All tokens >= floor lie in the groups whose maximum is >= floor,
and only these groups are read again.  The result is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Tokens of one program of the first pass.
CHUNK = 4096
MIN_GROUP = 8
# Groups per program of the second pass, limited by registers.
MAX_GROUPS = 16384
# Keys (see `ordered`) of -inf and of the lowest finite number.
MINUS_INFINITY = tl.constexpr(0x007FFFFF)


@dataclass(frozen=True)
class Grouping:
    """Chunks and groups of a vocabulary; depends on its size only."""

    chunk: int
    num_chunks: int
    group: int
    num_groups: int  # of all chunks, including padding

    @classmethod
    def of(cls, vocab_size: int) -> Grouping:
        chunk = min(CHUNK, max(2 * MIN_GROUP, triton.next_power_of_2(vocab_size)))
        num_chunks = triton.cdiv(vocab_size, chunk)
        group = min(chunk // 2, max(MIN_GROUP, triton.next_power_of_2(num_chunks * chunk) // MAX_GROUPS))
        return cls(chunk, num_chunks, group, num_chunks * chunk // group)

    def maxima(self, logits: torch.Tensor) -> torch.Tensor:
        """Uninitialised group maxima of every row."""
        return torch.empty(logits.shape[0], self.num_groups, dtype=logits.dtype, device=logits.device)


@triton.jit
def ordered(x):
    """Map fp32 to uint32, preserving order; -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def unordered(key):
    """The fp32 of a key of `ordered`."""
    bits = (key ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_chunk(row_ptr, chunk, vocab_size, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """(fp32 logits, ids), each [groups, GROUP]; -inf past the end."""
    groups = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32), ids


@triton.jit
def store_group_maxima(x, row_ptr, chunk):
    """Store the group maxima of a chunk.  row_ptr: of a row's maxima, in the dtype of the logits."""
    groups = chunk * x.shape[0] + tl.arange(0, x.shape[0])
    tl.store(row_ptr + groups, tl.max(x, axis=1).to(row_ptr.dtype.element_ty))


@triton.jit
def load_maxima(maxima_ptr, row, NUM_CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    """First-pass results of a row: (chunk indices, validity mask, their maxima, the row's maximum)."""
    chunks = tl.arange(0, PADDED)
    parts, is_chunk = row * NUM_CHUNKS + chunks, chunks < NUM_CHUNKS
    maxima = tl.load(maxima_ptr + parts, mask=is_chunk, other=float("-inf"))
    return parts, is_chunk, maxima, tl.max(maxima, axis=0)


@triton.jit
def load_group_keys(row_ptr, NUM_GROUPS: tl.constexpr, PADDED: tl.constexpr):
    """Keys of a row's group maxima; 0, below the key of every number, for padding."""
    groups = tl.arange(0, PADDED)
    x = tl.load(row_ptr + groups, mask=groups < NUM_GROUPS, other=float("-inf")).to(tl.float32)
    return tl.where(groups < NUM_GROUPS, ordered(x), 0)


@triton.jit
def find_floor(keys, highest, enough, MOST: tl.constexpr):
    """(floor, number of keys >= floor): between `enough` and MOST keys, if a floor above -inf has that many.

    Else the lowest floor with at most MOST keys: more than MOST keys are >= floor - 1, or all above -inf are >= floor.
    """
    low, high = tl.full((), MINUS_INFINITY, tl.uint32), highest + 1
    num_reaching = tl.full((), 0, tl.int32)
    # Gallop down from the top until too many keys are >= floor, then bisect; 2^22 is half an octave.
    step = tl.full((), 1 << 22, tl.uint32)
    while (high - low > 1) & (num_reaching < enough):
        distance = high - low
        middle = tl.where(distance > step, high - step, low + distance // 2)
        count = tl.sum((keys >= middle).to(tl.int32), axis=0)
        fits = count <= MOST
        step = tl.where(fits & (step < 0x80000000), step * 2, 0xFFFFFFFF)
        num_reaching = tl.where(fits, count, num_reaching)
        high, low = tl.where(fits, middle, high), tl.where(fits, low, middle)
    return high, num_reaching


@triton.jit
def listed(kept, targets, slots_ptr, count, CAPACITY: tl.constexpr):
    """Compact the indices where kept: [CAPACITY] int32, -1 from count on.  slots_ptr: scratch of this program."""
    tl.store(slots_ptr + targets, tl.arange(0, kept.shape[0]), mask=kept & (targets < CAPACITY))
    tl.debug_barrier()
    slots = tl.arange(0, CAPACITY)
    return tl.load(slots_ptr + slots, mask=slots < count, other=-1, cache_modifier=".cg")


@triton.jit
def load_groups(row_ptr, groups, vocab_size, GROUP: tl.constexpr):
    """(fp32 logits, ids), each [number of groups, GROUP]; group -1 gives -inf."""
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_token = (groups >= 0)[:, None] & (ids < vocab_size)
    return tl.load(row_ptr + ids, mask=is_token, other=float("-inf")).to(tl.float32), ids


@triton.jit
def pack_tokens(row_ptr, groups, floor, scratch_ptr, vocab_size, GROUP: tl.constexpr, CAPACITY: tl.constexpr):
    """Compact the ids and fp32 logits of the groups' tokens >= floor, at most CAPACITY of each, in scratch.

    Returns their number.  Ends with a barrier.  Works on four tokens at a time, which one thread holds for any dtype.
    """
    num_kept = tl.full((), 0, tl.int32)
    tl.debug_barrier()  # the scratch has been read before
    for first in tl.static_range(0, GROUP, 4):
        ids = groups[:, None] * GROUP + first + tl.arange(0, 4)[None, :]
        is_token = (groups >= 0)[:, None] & (ids < vocab_size)
        x = tl.load(row_ptr + ids, mask=is_token, other=float("-inf")).to(tl.float32)
        kept = (x >= floor).to(tl.int32)
        kept_of_groups = tl.sum(kept, axis=1)
        up_to = num_kept + tl.cumsum(kept_of_groups, axis=0)
        targets = (up_to - kept_of_groups)[:, None] + tl.cumsum(kept, axis=1) - 1
        fits = (kept > 0) & (targets < CAPACITY)
        tl.store(scratch_ptr + targets, ids, mask=fits)
        tl.store(scratch_ptr + CAPACITY + targets, x.to(tl.int32, bitcast=True), mask=fits)
        num_kept += tl.sum(kept_of_groups, axis=0)
    tl.debug_barrier()
    return num_kept
