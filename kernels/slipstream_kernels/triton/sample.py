"""sample in Triton-lang: one program per row, no sort.

Filters become one cut value, found by a 16-way search over the bits of the ordered floats: 8 passes, each summing
what lies above 15 candidates (counts for top-k, probability for top-p).  The last pass draws by Gumbel-max.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _ordered(x):
    """Map fp32 to uint32 so that the order is kept; -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _mix(x):
    """lowbias32, see reference/sample.py."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log_exponential(first_key, second_key, ids):
    """log of the Exp(1) noise of (row key, token id), see reference/sample.py."""
    bits = _mix(_mix(ids.to(tl.uint32) * 0x9E3779B9 + first_key) ^ second_key) & 0x7FFFFFFF
    u = (bits.to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31)
    u = tl.minimum(u, 1.0 - 2.0**-24)
    # -log(1 - u); 1 - u loses the digits of a small u, and small ones are the winners: a series there.
    series = u * (1.0 + u * (0.5 + u * (0.33333333 + u * 0.25)))
    return tl.log(tl.where(u < 0.01, series, -tl.log(1.0 - u)))


@triton.jit
def _mass_above(logits_row, vocab_size, maximum, inverse_t, floor, cuts, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """For each of 16 cuts: how many tokens (COUNT) or how much exp(z) lies at or above both the cut and floor."""
    columns = tl.arange(0, BLOCK)
    mass = tl.zeros((16,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        x = tl.load(logits_row + start + columns, mask=start + columns < vocab_size, other=float("-inf"))
        keys = _ordered(x)
        weight = tl.exp((x - maximum) * inverse_t)
        if COUNT:
            weight = tl.full((BLOCK,), 1.0, tl.float32)
        weight = tl.where((keys >= floor) & (start + columns < vocab_size), weight, 0.0)
        mass += tl.sum(tl.where(keys[:, None] >= cuts[None, :], weight[:, None], 0.0), axis=0)
    return mass


@triton.jit
def _find_cut(logits_row, vocab_size, maximum, inverse_t, floor, target, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key at or above which the mass reaches target; the maximum's key if even that is too large."""
    digits = tl.arange(0, 16).to(tl.uint32)
    cut = tl.full((), 0, tl.uint32)
    shift = tl.full((), 28, tl.uint32)
    for _ in range(8):
        mass = _mass_above(logits_row, vocab_size, maximum, inverse_t, floor, cut + (digits << shift), COUNT, BLOCK)
        digit = tl.sum(((mass >= target) & (digits > 0)).to(tl.int32), axis=0)
        cut += digit.to(tl.uint32) << shift
        shift -= 4
    return tl.minimum(cut, _ordered(maximum))


@triton.jit
def _greedy(logits_row, vocab_size, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    maximum = tl.full((), float("-inf"), tl.float32)
    token_id = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        x = tl.load(logits_row + start + columns, mask=start + columns < vocab_size, other=float("-inf"))
        block_maximum = tl.max(x, axis=0)
        block_id = start + tl.argmax(x, axis=0, tie_break_left=True)
        token_id = tl.where(block_maximum > maximum, block_id, token_id)
        maximum = tl.maximum(maximum, block_maximum)
    return maximum, token_id


@triton.jit
def _draw(
    logits_row, vocab_size, maximum, inverse_t, cut, lowest_z, seed, position, BLOCK: tl.constexpr
):  # fmt: skip
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    position = (position & 0xFFFFFFFF).to(tl.uint32)
    first_key = _mix(_mix(_mix(low) ^ high) ^ position)
    second_key = _mix(_mix(_mix(high ^ 0x5851F42D) ^ low) ^ position)
    columns = tl.arange(0, BLOCK)
    best = tl.full((), float("-inf"), tl.float32)
    token_id = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + columns
        x = tl.load(logits_row + ids, mask=ids < vocab_size, other=float("-inf"))
        z = (x - maximum) * inverse_t
        kept = (_ordered(x) >= cut) & (z >= lowest_z) & (ids < vocab_size)
        score = tl.where(kept, z - _log_exponential(first_key, second_key, ids), float("-inf"))
        block_best = tl.max(score, axis=0)
        block_id = start + tl.argmax(score, axis=0, tie_break_left=True)
        token_id = tl.where(block_best > best, block_id, token_id)
        best = tl.maximum(best, block_best)
    return token_id


@triton.jit
def _sample_kernel(
    logits_ptr, out_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr,
    row_stride, vocab_size,
    HAS_TEMPERATURE: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits_ptr + row * row_stride
    maximum, token_id = _greedy(logits_row, vocab_size, BLOCK)
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
        # A row of forbidden tokens only has no distribution: it stays greedy, as everywhere.
        if (temperature > 0) & (maximum > float("-inf")):
            inverse_t = 1.0 / temperature
            cut = tl.full((), 0, tl.uint32)
            lowest_z = tl.full((), float("-inf"), tl.float32)
            if HAS_TOP_K:
                top_k = tl.load(top_k_ptr + row)
                if (top_k > 0) & (top_k < vocab_size):
                    cut = _find_cut(logits_row, vocab_size, maximum, inverse_t, cut, top_k.to(tl.float32), True, BLOCK)
            if HAS_TOP_P:
                top_p = tl.load(top_p_ptr + row)
                if top_p < 1:
                    everything = tl.zeros((16,), tl.uint32)
                    mass = _mass_above(logits_row, vocab_size, maximum, inverse_t, cut, everything, False, BLOCK)
                    target = top_p * tl.max(mass, axis=0)
                    found = _find_cut(logits_row, vocab_size, maximum, inverse_t, cut, target, False, BLOCK)
                    cut = tl.maximum(cut, found)
            if HAS_MIN_P:
                min_p = tl.load(min_p_ptr + row)
                if min_p > 0:
                    lowest_z = tl.log(min_p)
            seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
            token_id = _draw(logits_row, vocab_size, maximum, inverse_t, cut, lowest_z, seed, position, BLOCK)
    tl.store(out_ptr + row, token_id.to(tl.int64))


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
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _sample_kernel[(num_rows,)](
            logits,
            token_ids,
            temperature,
            top_k,
            top_p,
            min_p,
            seeds,
            positions,
            logits.stride(0),
            vocab_size,
            HAS_TEMPERATURE=temperature is not None,
            HAS_TOP_K=top_k is not None,
            HAS_TOP_P=top_p is not None,
            HAS_MIN_P=min_p is not None,
            BLOCK=min(BLOCK, max(16, triton.next_power_of_2(vocab_size))),
            num_warps=8,
        )
    return token_ids
