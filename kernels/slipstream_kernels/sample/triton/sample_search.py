"""Device functions of sample: counter-based noise, cuts found by bisection over the bits of floats.

A cut is the largest key at or above which the mass (tokens for top-k, exp(z) for top-p) reaches a target.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream_kernels.sample.triton.token_groups import ordered
from slipstream_kernels.triton.interpreter import INTERPRETING


@triton.jit
def mix(x):
    """lowbias32, see sample/reference/sample.py."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log2(x):
    """The hardware's logarithm (absolute error 2^-22 near 1): tl.log2 is a polynomial, a third of all instructions."""
    if INTERPRETING:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def race(z, kept, ids, seed, position):
    """E / exp(z) with Exp(1) noise E of (seed, position, token id), inf if not kept; its argmin is Gumbel-max's draw.

    z: at most 0; -inf gives inf.  kept: None keeps every token.  One logarithm per token, where z - log(E) takes two.
    """
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    position = (position & 0xFFFFFFFF).to(tl.uint32)
    first_key = mix(mix(mix(low) ^ high) ^ position)
    second_key = mix(mix(mix(high ^ 0x5851F42D) ^ low) ^ position)
    bits = mix(mix(ids.to(tl.uint32) * 0x9E3779B9 + first_key) ^ second_key) & 0x7FFFFFFF
    # (bits + 1/2) / 2^31, rounded as if added first
    u = tl.minimum(bits.to(tl.int32).to(tl.float32) * (2.0**-31) + 2.0**-32, 1.0 - 2.0**-24)
    # E = -log(1 - u); 1 - u loses the digits of a small u, and small values win: use a series there.
    tail = 0.33333333 + u * (0.25 + u * (0.2 + u * 0.16666667))
    noise = tl.where(u < 0.0625, u * (1.0 + u * (0.5 + u * tail)), _log2(1.0 - u) * -0.6931471805599453)
    scores = noise * tl.exp2(z * -1.4426950408889634)
    if kept is not None:
        scores = tl.where(kept, scores, float("inf"))
    return scores


@triton.jit
def first_of_least(scores, ids, vocab_size):
    """The lowest id among the tokens with the minimum score."""
    return first_where(scores == tl.min(scores), ids, vocab_size)


@triton.jit
def first_where(is_found, ids, vocab_size):
    """The lowest id where is_found; the last one if it is nowhere."""
    return tl.min(tl.where(is_found, ids, vocab_size - 1))


@triton.jit
def _add_pairs(mass, count, other_mass, other_count):
    return mass + other_mass, count + other_count


@triton.jit
def _mass_and_count(weights, chosen):
    """Sum and number of the chosen weights; one reduction when compiled, because its latency bounds the search."""
    weights = tl.where(chosen, weights, 0.0)
    if INTERPRETING:  # it would call the reduction's function element by element
        mass, count = tl.sum(weights, axis=0), tl.sum(chosen.to(tl.int32), axis=0)
    else:
        mass, count = tl.reduce((weights, chosen.to(tl.int32)), 0, _add_pairs)
    return mass, count


@triton.jit
def find_cut(keys, weights, low, high, target):
    """The largest key in [low, high] at or above which the weights (0: no token) sum to target; low if none does.

    Ends when one key is left between the bounds; the same reduction counts their tokens.
    """
    is_there = weights > 0.0
    mass, low_count = _mass_and_count(weights, is_there & (keys >= low))
    is_reached, high_count = mass >= target, tl.full((), 0, tl.int32)
    first, high = low, tl.where(is_reached, high, low)
    while (low < high) & (low_count - high_count > 1):
        middle = low + (high - low + 1) // 2
        mass, count = _mass_and_count(weights, is_there & (keys >= middle))
        is_enough = mass >= target
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle - 1)
        low_count, high_count = tl.where(is_enough, count, low_count), tl.where(is_enough, high_count, count)
    # All tokens in [low, high] have the same key: it is the cut.
    left = tl.where(is_there & (keys <= high), keys ^ 0x80000000, 0x80000000).to(tl.int32, bitcast=True)
    return tl.where(is_reached, tl.maximum(low, tl.max(left, axis=0).to(tl.uint32, bitcast=True) ^ 0x80000000), first)


@triton.jit
def _row_masses(logits_row, vocab_size, maximum, inverse_t, floor, first, second, third,
                COUNT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Number of tokens (COUNT) or sum of exp(z) of a whole row at or above floor and each of three keys."""
    columns = tl.arange(0, BLOCK)
    first_mass = tl.zeros((BLOCK,), tl.float32)
    second_mass, third_mass = first_mass, first_mass
    for start in range(0, vocab_size, BLOCK):
        x = tl.load(logits_row + start + columns, mask=start + columns < vocab_size, other=float("-inf")).to(tl.float32)
        keys = ordered(x)
        weights = tl.exp((x - maximum) * inverse_t)
        if COUNT:
            weights = tl.full((BLOCK,), 1.0, tl.float32)
        weights = tl.where((keys >= floor) & (start + columns < vocab_size), weights, 0.0)
        first_mass += tl.where(keys >= first, weights, 0.0)
        second_mass += tl.where(keys >= second, weights, 0.0)
        third_mass += tl.where(keys >= third, weights, 0.0)
    return tl.sum(first_mass), tl.sum(second_mass), tl.sum(third_mass)


@triton.jit
def row_mass(logits_row, vocab_size, maximum, inverse_t, floor, BLOCK: tl.constexpr):
    """Sum of exp(z) over the tokens of a row at or above floor."""
    mass, _, _ = _row_masses(logits_row, vocab_size, maximum, inverse_t, floor, floor, floor, floor, False, BLOCK)
    return mass


@triton.jit
def find_row_cut(logits_row, vocab_size, maximum, inverse_t, floor, target, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """find_cut among all tokens of a row at or above floor; quarters the range, so reads the row up to 16 times."""
    low, high = floor, ordered(maximum)
    while low < high:
        step = (high - low + 3) // 4
        first, second, third = low + step, low + 2 * step, low + 3 * step
        first_mass, second_mass, third_mass = _row_masses(
            logits_row, vocab_size, maximum, inverse_t, floor, first, second, third, COUNT, BLOCK
        )
        reached = ((first_mass >= target) & (first <= high)).to(tl.uint32)
        reached += ((second_mass >= target) & (second <= high)).to(tl.uint32)
        reached += ((third_mass >= target) & (third <= high)).to(tl.uint32)
        low += step * reached
        high = tl.minimum(high, low + (step - 1))
    return low
