"""sample in Triton-lang: one pass over the logits by many programs a row, then one program a row; no sort, no atomics.

Pass one (a program per chunk of a row) writes the winner of greedy and unfiltered rows, and for filtered rows the
largest logit of each group of tokens.  Pass two reads the groups with the largest maxima, finds the cuts among their
few thousand tokens and draws.  If the filters keep tokens outside these groups (a flat distribution), pass two reads
all logits instead: exact, ten times slower.
Both grids and all orders of summation depend only on the vocabulary size, so a row's result does not depend on the
batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from slipstream_kernels.sample.metadata import SamplingMetadata
from slipstream_kernels.sample.triton.greedy import greedy
from slipstream_kernels.sample.triton.sample_search import (
    find_cut,
    find_row_cut,
    first_of_least,
    first_where,
    race,
    row_mass,
)
from slipstream_kernels.sample.triton.token_groups import (
    MINUS_INFINITY,
    Grouping,
    find_floor,
    listed,
    load_chunk,
    load_group_keys,
    load_maxima,
    ordered,
    pack_tokens,
    store_group_maxima,
    unordered,
)
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.step_kernel import step_kernel, two_tensors

# Capacities of pass two per filtered row: tokens of the selected groups, and tokens from the floor up.  MOST groups are
# selected so that the latter are about 1,600 for any vocabulary size.
GROUPED_TOKENS = 16384
TOKENS = 2048
SLOW_BLOCK = 2048
CHUNK_LAUNCH = {"num_warps": 8, "maxnreg": 64}
CHOOSE_WARPS = 16
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


@step_kernel
def _chunk_kernel(
    logits_ptr, maxima_ptr, sums_ptr, winners_ptr, group_maxima_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr, row_stride, vocab_size,
    NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, rows).  sums: minimum of `race` for unfiltered rows, sum of exp(z - chunk's max z) for filtered."""
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)  # on its way together with the logits
    x, ids = load_chunk(logits_ptr + row * row_stride, chunk, vocab_size, CHUNK, GROUP)
    maximum = tl.max(x)
    part = row * NUM_CHUNKS + chunk
    tl.store(maxima_ptr + part, maximum)
    if temperature > 0:
        top_k, top_p, min_p = _load_filters(
            row, vocab_size, top_k_ptr, top_p_ptr, min_p_ptr, HAS_TOP_K, HAS_TOP_P, HAS_MIN_P
        )
        # -inf - -inf is NaN: a chunk may contain forbidden tokens only.
        z = (x - tl.where(maximum == float("-inf"), 0.0, maximum)) * (1.0 / temperature)
        if (top_k > 0) | (top_p < 1) | (min_p > 0):
            if (top_k == 0) & (top_p < 1):
                tl.store(sums_ptr + part, tl.sum(tl.exp(z)))
            store_group_maxima(x, group_maxima_ptr + row * (NUM_CHUNKS * CHUNK // GROUP), chunk)
        else:
            scores = race(z, None, ids, tl.load(seeds_ptr + row), tl.load(positions_ptr + row) + 1)
            least = tl.min(scores)
            tl.store(sums_ptr + part, least)
            tl.store(winners_ptr + part, first_where(scores == least, ids, vocab_size))
    else:
        tl.store(winners_ptr + part, first_where(x == maximum, ids, vocab_size))


@triton.jit
def _candidates(logits_row, group_maxima_row, scratch, maximum, top_k, vocab_size, NUM_GROUPS: tl.constexpr,
                GROUPS_PADDED: tl.constexpr, GROUP: tl.constexpr, CAPACITY: tl.constexpr, MOST: tl.constexpr,
                TOKENS: tl.constexpr):  # fmt: skip
    """([TOKENS] logits, ids, floor): every token with logit >= floor; -inf pads.  floor LOWEST: all tokens; inf: none.

    scratch: [2 * TOKENS] int32 of this program.
    """
    keys = load_group_keys(group_maxima_row, NUM_GROUPS, GROUPS_PADDED)
    num_possible = tl.sum((keys > MINUS_INFINITY).to(tl.int32), axis=0)
    # k groups with maxima >= floor have at least k tokens >= floor: the k-th largest token is among them.
    enough = tl.where((top_k > 0) & (top_k < MOST * 7 // 8), top_k, MOST * 7 // 8)
    key, count = find_floor(keys, ordered(maximum), tl.minimum(enough, num_possible), MOST)
    kept = keys >= key
    groups = listed(kept, tl.cumsum(kept.to(tl.int32), axis=0) - 1, scratch, count, CAPACITY)
    floor = tl.where(count >= num_possible, LOWEST, unordered(key))
    num_kept = pack_tokens(logits_row, groups, floor, scratch, vocab_size, GROUP, TOKENS)
    slots = tl.arange(0, TOKENS)
    ids = tl.load(scratch + slots, mask=slots < num_kept, other=-1, cache_modifier=".cg")
    x = tl.load(scratch + TOKENS + slots, mask=slots < num_kept, other=0, cache_modifier=".cg")
    x = tl.where(slots < num_kept, x.to(tl.float32, bitcast=True), float("-inf"))
    return x, ids, tl.where(num_kept > TOKENS, float("inf"), floor)


@triton.jit
def _choose_among(x, ids, floor, chunk_maxima, sums, maximum, inverse_t, top_k, top_p, min_p, seed, position,
                  vocab_size):  # fmt: skip
    """The token drawn among the candidates (all tokens >= floor), and whether the filters keep only candidates."""
    keys, z = ordered(x), (x - maximum) * inverse_t
    cut, highest = ordered(floor), ordered(maximum)
    x_kept = x >= floor
    is_enough = floor == LOWEST
    knows_total = True
    if top_k > 0:
        ones = tl.where(x_kept, 1.0, 0.0)
        knows_total = is_enough | (tl.sum(ones) >= top_k)
        is_enough = knows_total
        cut = find_cut(keys, ones, cut, highest, top_k.to(tl.float32))
    if top_p < 1:
        weights = tl.where(x_kept & (keys >= cut), tl.exp(z), 0.0)
        mass = tl.sum(weights)
        total = mass
        if top_k == 0:
            shift = tl.where(chunk_maxima == float("-inf"), float("-inf"), (chunk_maxima - maximum) * inverse_t)
            total = tl.sum(tl.where(shift > float("-inf"), sums * tl.exp(shift), 0.0))
        is_enough = is_enough | (mass >= top_p * total)
        cut = find_cut(keys, weights, cut, highest, top_p * total)
    lowest_z = tl.where(min_p > 0, tl.log(min_p), float("-inf"))
    is_enough = (is_enough | ((floor - maximum) * inverse_t <= lowest_z)) & knows_total & (floor <= maximum)
    scores = race(z, x_kept & (keys >= cut) & (z >= lowest_z), ids, seed, position)
    return first_of_least(scores, ids, vocab_size), is_enough


@triton.jit
def _choose_slowly(logits_row, maximum, inverse_t, top_k, top_p, min_p, seed, position, vocab_size,
                   BLOCK: tl.constexpr):  # fmt: skip
    """The token drawn from all logits of a row, for filters that keep more than the candidates."""
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
        x = tl.load(logits_row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        z = (x - maximum) * inverse_t
        kept = (ordered(x) >= cut) & (z >= lowest_z) & (x > float("-inf"))
        scores = race(z, kept, ids, seed, position)
        best_ids = tl.where(scores < best, ids, best_ids)
        best = tl.minimum(best, scores)
    return first_of_least(best, best_ids, vocab_size)


@step_kernel
def _choose_kernel(
    logits_ptr, out_ptr, maxima_ptr, sums_ptr, winners_ptr, group_maxima_ptr, scratch_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr, row_stride, vocab_size,
    NUM_CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr,
    GROUP: tl.constexpr, CAPACITY: tl.constexpr, MOST: tl.constexpr, TOKENS: tl.constexpr, SLOW_BLOCK: tl.constexpr,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (rows).  Draws one token from the results of pass one."""
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    parts, is_chunk, maxima, maximum = load_maxima(maxima_ptr, row, NUM_CHUNKS, CHUNKS_PADDED)
    winners = tl.load(winners_ptr + parts, mask=is_chunk, other=0)
    temperature = tl.load(temperature_ptr + row)
    if temperature <= 0:
        tl.store(out_ptr + row, first_of_least(-maxima, winners, vocab_size).to(tl.int64))
        return
    # A row in which all tokens are forbidden has no distribution: it stays greedy.
    if maximum == float("-inf"):
        tl.store(out_ptr + row, tl.full((), 0, tl.int64))
        return
    inverse_t = 1.0 / temperature
    top_k, top_p, min_p = _load_filters(
        row, vocab_size, top_k_ptr, top_p_ptr, min_p_ptr, HAS_TOP_K, HAS_TOP_P, HAS_MIN_P
    )
    sums = tl.load(sums_ptr + parts, mask=is_chunk, other=float("inf"))
    if (top_k > 0) | (top_p < 1) | (min_p > 0):
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row) + 1
        logits_row = logits_ptr + row * row_stride
        x, ids, floor = _candidates(logits_row, group_maxima_ptr + row * NUM_GROUPS, scratch_ptr + row * 2 * TOKENS,
                                    maximum, top_k, vocab_size, NUM_GROUPS, GROUPS_PADDED, GROUP, CAPACITY, MOST,
                                    TOKENS)  # fmt: skip
        token_id, is_enough = _choose_among(x, ids, floor, maxima, sums, maximum, inverse_t, top_k, top_p, min_p,
                                            seed, position, vocab_size)  # fmt: skip
        if not is_enough:
            token_id = _choose_slowly(logits_row, maximum, inverse_t, top_k, top_p, min_p,
                                      seed, position, vocab_size, SLOW_BLOCK)  # fmt: skip
        tl.store(out_ptr + row, token_id.to(tl.int64))
    else:
        scores = tl.where(maxima > float("-inf"), sums * tl.exp((maximum - maxima) * inverse_t), float("inf"))
        tl.store(out_ptr + row, first_of_least(scores, winners, vocab_size).to(tl.int64))


@dataclass(frozen=True)
class FirstPass:
    """Results of the first pass per row.  group_maxima: written for filtered rows only."""

    grouping: Grouping
    maxima: torch.Tensor
    sums: torch.Tensor
    winners: torch.Tensor
    group_maxima: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """In the order of the kernels' arguments."""
        return self.maxima, self.sums, self.winners, self.group_maxima


def first_pass(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    filters: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> FirstPass:
    """Launch the first pass.  filters: top_k, top_p, min_p."""
    num_rows, vocab_size = logits.shape
    grouping = Grouping.of(vocab_size)
    is_filtered = any(column is not None for column in filters)
    maxima, sums = two_tensors(num_rows, grouping.num_chunks, device=logits.device)
    winners = torch.empty(num_rows, grouping.num_chunks, dtype=torch.int32, device=logits.device)
    left = FirstPass(grouping, maxima, sums, winners, grouping.maxima(logits) if is_filtered else maxima)
    options = (temperature, *filters, seeds, positions, logits.stride(0), vocab_size)
    _chunk_kernel[(grouping.num_chunks, num_rows)](
        logits,
        *left.tensors(),
        *options,
        CHUNK=grouping.chunk,
        **_used(filters, grouping, logits.device),
        **CHUNK_LAUNCH,
    )
    return left


def most_groups(grouping: Grouping, vocab_size: int) -> int:
    """Max number of groups from which a row's candidates are read."""
    if vocab_size <= TOKENS:
        return grouping.num_groups
    return min(_capacity(grouping) * 3 // 4, grouping.num_groups * 3 // 5)


def _capacity(grouping: Grouping) -> int:
    return min(GROUPED_TOKENS // grouping.group, triton.next_power_of_2(grouping.num_groups))


def _used(filters: tuple[torch.Tensor | None, ...], grouping: Grouping, device: torch.device) -> dict[str, Any]:
    """Compile-time arguments of both kernels."""
    top_k, top_p, min_p = filters
    return {
        "HAS_TOP_K": top_k is not None,
        "HAS_TOP_P": top_p is not None,
        "HAS_MIN_P": min_p is not None,
        "NUM_CHUNKS": grouping.num_chunks,
        "GROUP": grouping.group,
        **dependent_launch(device),
    }


def sample(
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ops.sample."""
    temperature, filters = metadata.temperature, metadata.filters
    num_rows, vocab_size = logits.shape
    device = logits.device
    if temperature is None:
        return greedy(logits, out)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device) if out is None else out
    if num_rows == 0:
        return token_ids
    is_filtered = any(column is not None for column in filters)
    left = first_pass(logits, temperature, filters, seeds, positions)
    grouping = left.grouping
    scratch = torch.empty(num_rows, 2 * TOKENS if is_filtered else 1, dtype=torch.int32, device=device)
    _choose_kernel[(num_rows,)](
        logits,
        token_ids,
        *left.tensors(),
        scratch,
        *(temperature, *filters, seeds, positions, logits.stride(0), vocab_size),
        CHUNKS_PADDED=triton.next_power_of_2(grouping.num_chunks),
        NUM_GROUPS=grouping.num_groups,
        GROUPS_PADDED=triton.next_power_of_2(grouping.num_groups),
        CAPACITY=_capacity(grouping),
        MOST=most_groups(grouping, vocab_size),
        TOKENS=TOKENS,
        SLOW_BLOCK=SLOW_BLOCK,
        num_warps=CHOOSE_WARPS if is_filtered else 1,
        **_used(filters, grouping, device),
    )
    return token_ids
