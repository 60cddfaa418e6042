"""sample in Triton-lang: one pass over the logits by many programs a row, then one program a row; no sort, no atomics.

Pass one (a program per chunk of a row) leaves the winner of greedy and unfiltered rows; of filtered rows it leaves the
chunk's largest tokens, all those above a floor.  Pass two finds the cuts among these few thousand candidates and draws.
A row whose filters keep tokens below a floor (flat and wide) is solved exactly too, from the logits, an order slower.
Both grids and all orders of summation depend on the vocabulary's size alone: a row is the same in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from slipstream_kernels.triton.sample_search import find_cut, find_row_cut, first_of_least, ordered, race, row_mass

# A chunk is SEGMENTS pieces of SEGMENT ids, dealt out in turn: neighbours in the vocabulary, likely alike, part.
SEGMENT = 1024
SEGMENTS = 4
# Candidates a chunk can leave.  The floor aims at 73: 56 of its 128 groups of 32 tokens have one.
CAPACITY = 128
SLOW_BLOCK = 2048
CHUNK_LAUNCH = {"num_warps": 8, "maxnreg": 64}
CHOOSE_LAUNCH = {"num_warps": 8}
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _load_filters(row, vocab_size, top_k_ptr, top_p_ptr, min_p_ptr,
                  HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr):  # fmt: skip
    """A row's (top_k, top_p, min_p); off is 0, 1 and 0."""
    top_k, top_p, min_p = 0, 1.0, 0.0
    if HAS_TOP_K:
        top_k = tl.load(top_k_ptr + row)
        top_k = tl.where((top_k > 0) & (top_k < vocab_size), top_k, 0)
    if HAS_TOP_P:
        top_p = tl.load(top_p_ptr + row)
    if HAS_MIN_P:
        min_p = tl.load(min_p_ptr + row)
    return top_k, top_p, min_p


@triton.jit
def _floor(x, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, CAPACITY: tl.constexpr):
    """A value that 56 or a few more of the chunk's 128 groups of tokens reach; LOWEST: all tokens fit."""
    floor = tl.full((), LOWEST, tl.float32)
    if SEGMENTS * SEGMENT > CAPACITY:
        # Eight neighbours, which one or two threads hold.
        NUM_GROUPS: tl.constexpr = SEGMENT // 8
        groups = tl.max(tl.reshape(tl.max(x, axis=0), (NUM_GROUPS, 8)), axis=1)
        # Half of them are tried: finer than the noise.
        trials = tl.min(tl.reshape(groups, (NUM_GROUPS // 2, 2)), axis=1)
        num_reaching = tl.sum((groups[None, :] >= trials[:, None]).to(tl.int32), axis=1)
        floor = tl.maximum(floor, tl.max(tl.where(num_reaching >= NUM_GROUPS * 7 // 16, trials, float("-inf"))))
    return floor


@triton.jit
def _collect(x, ids, floor_ptr, ids_ptr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, CAPACITY: tl.constexpr):
    """Leave the ids of the chunk's tokens from a floor up, then -1; floor inf says that they did not fit."""
    floor = _floor(x, SEGMENTS, SEGMENT, CAPACITY)
    kept = (x >= floor).to(tl.int32)
    # Columns first, then within them: one short scan instead of one over the chunk.
    kept_in_columns = tl.sum(kept, axis=0)
    before = tl.cumsum(kept_in_columns, axis=0) - kept_in_columns
    positions = before[None, :] + tl.cumsum(kept, axis=0) - 1
    tl.store(ids_ptr + positions, ids, mask=(kept > 0) & (positions < CAPACITY))
    num_kept = tl.sum(kept_in_columns)
    slots = tl.arange(0, CAPACITY)
    tl.store(ids_ptr + slots, tl.full((CAPACITY,), -1, tl.int32), mask=slots >= num_kept)
    tl.store(floor_ptr, tl.where(num_kept > CAPACITY, float("inf"), floor))


@triton.jit
def _chunk_kernel(
    logits_ptr, maxima_ptr, sums_ptr, floors_ptr, winners_ptr, ids_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr, row_stride, vocab_size,
    NUM_CHUNKS: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, CAPACITY: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, rows).  sums: the least race of an unfiltered row, the sum of exp(z - chunk's z) of a filtered."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    segments = tl.arange(0, SEGMENTS) * NUM_CHUNKS + chunk
    ids = segments[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf"))
    maximum = tl.max(x)
    part = row * NUM_CHUNKS + chunk
    tl.store(maxima_ptr + part, maximum)
    temperature = 0.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        top_k, top_p, min_p = _load_filters(
            row, vocab_size, top_k_ptr, top_p_ptr, min_p_ptr, HAS_TOP_K, HAS_TOP_P, HAS_MIN_P
        )
        # -inf - -inf would be NaN: a chunk may hold forbidden tokens only.
        z = (x - tl.where(maximum == float("-inf"), 0.0, maximum)) * (1.0 / temperature)
        if (top_k > 0) | (top_p < 1) | (min_p > 0):
            if (top_k == 0) & (top_p < 1):
                tl.store(sums_ptr + part, tl.sum(tl.exp(z)))
            _collect(x, ids, floors_ptr + part, ids_ptr + part * CAPACITY, SEGMENTS, SEGMENT, CAPACITY)
        else:
            scores = race(z, x > float("-inf"), ids, tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
            tl.store(sums_ptr + part, tl.min(scores))
            tl.store(winners_ptr + part, first_of_least(scores, ids, vocab_size))
    else:
        tl.store(winners_ptr + part, first_of_least(-x, ids, vocab_size))


@triton.jit
def _choose_among(x, ids, floor, chunk_maxima, sums, maximum, inverse_t, top_k, top_p, min_p, seed, position,
                  vocab_size):  # fmt: skip
    """Token drawn among the candidates, and whether they were enough: they hold every token from floor up."""
    keys, z = ordered(x), (x - maximum) * inverse_t
    cut, highest = ordered(floor), ordered(maximum)
    # Below the highest floor some chunks left their tokens and some did not.
    x_kept = x >= floor
    is_enough = floor == LOWEST
    knows_total = True
    if top_k > 0:
        ones = tl.where(x_kept, 1.0, 0.0)
        knows_total = is_enough | (tl.sum(ones) >= top_k)
        is_enough = knows_total
        cut = find_cut(keys, ones, cut, highest, top_k.to(tl.float32), True)
    if top_p < 1:
        weights = tl.where(x_kept & (keys >= cut), tl.exp(z), 0.0)
        mass = tl.sum(weights)
        total = mass
        if top_k == 0:
            shift = tl.where(chunk_maxima == float("-inf"), float("-inf"), (chunk_maxima - maximum) * inverse_t)
            total = tl.sum(tl.where(shift > float("-inf"), sums * tl.exp(shift), 0.0))
        is_enough = is_enough | (mass >= top_p * total)
        cut = find_cut(keys, weights, cut, highest, top_p * total, False)
    lowest_z = tl.where(min_p > 0, tl.log(min_p), float("-inf"))
    is_enough = (is_enough | ((floor - maximum) * inverse_t <= lowest_z)) & knows_total
    scores = race(z, x_kept & (keys >= cut) & (z >= lowest_z), ids, seed, position)
    return first_of_least(scores, ids, vocab_size), is_enough


@triton.jit
def _choose_slowly(logits_row, maximum, inverse_t, top_k, top_p, min_p, seed, position, vocab_size,
                   BLOCK: tl.constexpr):  # fmt: skip
    """Token drawn from the logits themselves: filters that keep more than the candidates."""
    cut = tl.full((), 0, tl.uint32)
    if top_k > 0:
        target = top_k.to(tl.float32)
        cut = find_row_cut(logits_row, vocab_size, maximum, inverse_t, cut, target, True, BLOCK)
    if top_p < 1:
        target = top_p * row_mass(logits_row, vocab_size, maximum, inverse_t, cut, BLOCK)
        cut = find_row_cut(logits_row, vocab_size, maximum, inverse_t, cut, target, False, BLOCK)
    lowest_z = tl.where(min_p > 0, tl.log(min_p), float("-inf"))
    columns = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("inf"), tl.float32)
    best_ids = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + columns
        x = tl.load(logits_row + ids, mask=ids < vocab_size, other=float("-inf"))
        z = (x - maximum) * inverse_t
        kept = (ordered(x) >= cut) & (z >= lowest_z) & (x > float("-inf"))
        scores = race(z, kept, ids, seed, position)
        best_ids = tl.where(scores < best, ids, best_ids)
        best = tl.minimum(best, scores)
    return first_of_least(best, best_ids, vocab_size)


@triton.jit
def _choose_kernel(
    logits_ptr, out_ptr, maxima_ptr, sums_ptr, floors_ptr, winners_ptr, ids_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr, row_stride, vocab_size,
    NUM_CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr, CAPACITY: tl.constexpr, SLOW_BLOCK: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
):  # fmt: skip
    """Grid (rows): from what the chunks left to one token."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS_PADDED)
    parts, is_chunk = row * NUM_CHUNKS + chunks, chunks < NUM_CHUNKS
    maxima = tl.load(maxima_ptr + parts, mask=is_chunk, other=float("-inf"))
    maximum = tl.max(maxima, axis=0)
    temperature = 0.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
    if temperature <= 0:
        winners = tl.load(winners_ptr + parts, mask=is_chunk, other=0)
        tl.store(out_ptr + row, first_of_least(-maxima, winners, vocab_size).to(tl.int64))
        return
    # A row of forbidden tokens only has no distribution: it stays greedy, as everywhere.
    if maximum == float("-inf"):
        tl.store(out_ptr + row, tl.full((), 0, tl.int64))
        return
    inverse_t = 1.0 / temperature
    top_k, top_p, min_p = _load_filters(
        row, vocab_size, top_k_ptr, top_p_ptr, min_p_ptr, HAS_TOP_K, HAS_TOP_P, HAS_MIN_P
    )
    sums = tl.load(sums_ptr + parts, mask=is_chunk, other=float("inf"))
    if (top_k > 0) | (top_p < 1) | (min_p > 0):
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        floor = tl.max(tl.load(floors_ptr + parts, mask=is_chunk, other=LOWEST), axis=0)
        slots = tl.arange(0, CHUNKS_PADDED * CAPACITY)
        ids = tl.load(ids_ptr + row * NUM_CHUNKS * CAPACITY + slots, mask=slots < NUM_CHUNKS * CAPACITY, other=-1)
        x = tl.load(logits_ptr + row * row_stride + ids, mask=ids >= 0, other=float("-inf"))
        token_id, is_enough = _choose_among(x, ids, floor, maxima, sums, maximum, inverse_t, top_k, top_p, min_p,
                                            seed, position, vocab_size)  # fmt: skip
        if not is_enough:
            token_id = _choose_slowly(logits_ptr + row * row_stride, maximum, inverse_t, top_k, top_p, min_p,
                                      seed, position, vocab_size, SLOW_BLOCK)  # fmt: skip
        tl.store(out_ptr + row, token_id.to(tl.int64))
    else:
        winners = tl.load(winners_ptr + parts, mask=is_chunk, other=0)
        scores = tl.where(maxima > float("-inf"), sums * tl.exp((maximum - maxima) * inverse_t), float("inf"))
        tl.store(out_ptr + row, first_of_least(scores, winners, vocab_size).to(tl.int64))


@dataclass(frozen=True)
class Chunking:
    """How a vocabulary is cut: a function of its size alone."""

    num_chunks: int
    segments: int
    segment: int

    @classmethod
    def of(cls, vocab_size: int) -> Chunking:
        segment = min(SEGMENT, max(16, triton.next_power_of_2(vocab_size)))
        num_segments = triton.cdiv(vocab_size, segment)
        segments = min(SEGMENTS, triton.next_power_of_2(num_segments))
        return cls(triton.cdiv(num_segments, segments), segments, segment)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> torch.Tensor:
    """See ops.sample."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return token_ids
    chunking = Chunking.of(vocab_size)
    num_chunks = chunking.num_chunks
    is_filtered = temperature is not None and not (top_k is None and top_p is None and min_p is None)
    num_slots = num_chunks * CAPACITY if is_filtered else 1
    maxima, sums, floors = torch.empty(3, num_rows, num_chunks, dtype=torch.float32, device=device)
    winners = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    ids = torch.empty(num_rows, num_slots, dtype=torch.int32, device=device)
    left = (maxima, sums, floors, winners, ids)
    options = (temperature, top_k, top_p, min_p, seeds, positions, logits.stride(0), vocab_size)
    used = {
        "HAS_TEMPERATURE": temperature is not None,
        "HAS_TOP_K": top_k is not None,
        "HAS_TOP_P": top_p is not None,
        "HAS_MIN_P": min_p is not None,
        "CAPACITY": CAPACITY,
        "NUM_CHUNKS": num_chunks,
    }
    _chunk_kernel[(num_chunks, num_rows)](
        logits, *left, *options, SEGMENTS=chunking.segments, SEGMENT=chunking.segment, **used, **CHUNK_LAUNCH
    )
    padded = triton.next_power_of_2(num_chunks)
    _choose_kernel[(num_rows,)](
        logits, token_ids, *left, *options, CHUNKS_PADDED=padded, SLOW_BLOCK=SLOW_BLOCK, **used, **CHOOSE_LAUNCH
    )
    return token_ids
