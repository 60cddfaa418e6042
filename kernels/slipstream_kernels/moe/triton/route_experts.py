"""route_experts in Triton-lang.

One program routes the tokens of a small step. For more, a program chooses for a few tokens, and one sorts per expert,
which counts the pairs of the experts before it and the ranks of its own: no atomics, so the order is always the same,
and the ids of 8,192 tokens are 64 KB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.routing import LARGEST_LOGIT, LEAST_TOTAL, Routing, RoutingBiases, RoutingRule, empty_routing
from slipstream_kernels.triton.dependent_launch import await_previous, dependent_launch, start_dependents
from slipstream_kernels.triton.step_kernel import step_kernel

SORT_BLOCK = 1024
LARGEST, LEAST = tl.constexpr(LARGEST_LOGIT), tl.constexpr(LEAST_TOTAL)
# Logits that a program of the choice holds, and of rows that are read number by number, whose sums and maxima take more
# steps.
CHOSEN_VALUES, UNALIGNED_VALUES = 1024, 256
ROUTED_VALUES = 512  # logits up to which one program does it all; measured in docs/measurements/moe.md


@triton.jit
def _scores_and_ranks(
    logits_ptr,
    logit_bias_ptr,
    bias_ptr,
    tokens,
    num_tokens,
    logits_row_stride,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_LOGIT_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SUMS_TWO: tl.constexpr,
):
    """What weights are shares of, 0 for experts that there are not; and what experts are ranked by, -inf for those.

    Softmax before its division: exp(logit - the token's largest).
    """
    experts = tl.arange(0, EXPERTS_PADDED)
    places = logits_ptr + tokens.to(tl.int64)[:, None] * logits_row_stride + experts[None, :]
    is_one = (experts < NUM_EXPERTS)[None, :]
    logits = tl.load(places, mask=(tokens < num_tokens)[:, None] & is_one, other=float("-inf")).to(tl.float32)
    if HAS_LOGIT_BIAS:
        logits += tl.load(logit_bias_ptr + experts, mask=experts < NUM_EXPERTS, other=0.0).to(tl.float32)[None, :]
    # NaN would be nobody's maximum: an expert that there is not, and rows that nobody writes.
    logits = tl.where(logits == logits, tl.clamp(logits, -LARGEST, LARGEST), -LARGEST)
    scores = tl.sigmoid(logits) if IS_SIGMOID else tl.exp(logits - tl.max(logits, axis=1)[:, None])
    scores = tl.where(is_one, scores, 0.0)
    ranks = scores
    if HAS_BIAS:
        if not IS_SIGMOID:
            ranks = ranks / tl.sum(scores, axis=1)[:, None]
        ranks += tl.load(bias_ptr + experts, mask=experts < NUM_EXPERTS, other=0.0)[None, :]
    ranks = tl.where(is_one, ranks, float("-inf"))
    if NUM_GROUPS > 1:
        ranks = _in_best_groups(ranks, experts, NUM_EXPERTS // NUM_GROUPS, NUM_GROUPS, TOPK_GROUPS, SUMS_TWO)
    return scores, ranks


@triton.jit
def _in_best_groups(
    ranks, experts, SIZE: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, SUMS_TWO: tl.constexpr
):
    """ranks, of experts beyond the token's best groups -inf."""
    own_group = experts // SIZE
    own = tl.zeros_like(ranks)  # the score of each expert's group
    for group in tl.static_range(NUM_GROUPS):
        inside = tl.where((own_group == group)[None, :], ranks, float("-inf"))
        score = tl.max(inside, axis=1)
        if SUMS_TWO:
            _, _, others = _take_best(inside, experts)
            score += tl.max(others, axis=1)
        own = tl.where((own_group == group)[None, :], score[:, None], own)
    num_better = tl.zeros_like(ranks)
    for group in tl.static_range(NUM_GROUPS):
        score = tl.max(tl.where((own_group == group)[None, :], own, float("-inf")), axis=1)[:, None]
        is_better = (score > own) | ((score == own) & (own_group > group)[None, :])
        num_better += is_better.to(tl.float32)
    return tl.where(num_better < TOPK_GROUPS, ranks, float("-inf"))


@triton.jit
def _take_best(left, experts):
    """For each token: the best expert left, its mask, and the ranks without it."""
    best = tl.argmax(left, axis=1)
    is_best = experts[None, :] == best[:, None]
    return best, is_best, tl.where(is_best, float("-inf"), left)


@triton.jit
def _score_of(scores, ranks, is_best, HAS_BIAS: tl.constexpr):
    """The score of the best of those ranks."""
    if HAS_BIAS:
        return tl.sum(tl.where(is_best, scores, 0.0), axis=1)
    return tl.max(ranks, axis=1)


@triton.jit
def _total(
    scores,
    ranks,
    experts,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """What a token's weights are shares of: the chosen experts, all of them, or one of a sigmoid."""
    total = tl.sum(scores, axis=1)
    if IS_SIGMOID:
        total = tl.zeros_like(total) + 1.0
    if RENORMALISE:
        total = tl.zeros_like(total)
        for _ in tl.static_range(TOP_K):
            _, is_best, others = _take_best(ranks, experts)
            total += _score_of(scores, ranks, is_best, HAS_BIAS)
            ranks = others
        total += LEAST
    return total


@step_kernel
def _route_experts_kernel(
    logits_ptr,
    logit_bias_ptr,
    bias_ptr,
    weights_ptr,
    rows_ptr,
    tokens_ptr,
    offsets_ptr,
    logits_row_stride,
    num_tokens,
    scale,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_LOGIT_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SUMS_TWO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    tokens, experts = tl.arange(0, BLOCK_M), tl.arange(0, EXPERTS_PADDED)
    mask = tokens < num_tokens
    scores, ranks = _scores_and_ranks(
        logits_ptr,
        logit_bias_ptr,
        bias_ptr,
        tokens,
        num_tokens,
        logits_row_stride,
        NUM_EXPERTS,
        EXPERTS_PADDED,
        IS_SIGMOID,
        HAS_LOGIT_BIAS,
        HAS_BIAS,
        NUM_GROUPS,
        TOPK_GROUPS,
        SUMS_TWO,
    )
    total = _total(scores, ranks, experts, TOP_K, RENORMALISE, IS_SIGMOID, HAS_BIAS)
    left = ranks
    for turn in tl.static_range(TOP_K):
        _, is_best, others = _take_best(left, experts)
        weight = _score_of(scores, left, is_best, HAS_BIAS) / total * scale
        tl.store(weights_ptr + tokens * TOP_K + turn, weight, mask=mask)
        left = others
    is_chosen = ((left != ranks) & mask[:, None]).to(tl.int32)
    counts = tl.sum(is_chosen, axis=0)
    begins = tl.cumsum(counts, axis=0) - counts
    tl.store(offsets_ptr + experts, begins, mask=experts < NUM_EXPERTS)
    tl.store(offsets_ptr + NUM_EXPERTS, tl.sum(counts, axis=0))
    rows_of = begins[None, :] + tl.cumsum(is_chosen, axis=0) - is_chosen
    for turn in tl.static_range(TOP_K):
        _, is_best, ranks = _take_best(ranks, experts)
        rows = tl.sum(tl.where(is_best, rows_of, 0), axis=1)
        tl.store(rows_ptr + tokens * TOP_K + turn, rows, mask=mask)
        tl.store(tokens_ptr + rows, tokens, mask=mask)


@step_kernel
def _choose_experts_kernel(
    logits_ptr,
    logit_bias_ptr,
    bias_ptr,
    experts_ptr,
    weights_ptr,
    logits_row_stride,
    num_tokens,
    scale,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_LOGIT_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SUMS_TWO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    experts = tl.arange(0, EXPERTS_PADDED)
    mask = tokens < num_tokens
    scores, ranks = _scores_and_ranks(
        logits_ptr,
        logit_bias_ptr,
        bias_ptr,
        tokens,
        num_tokens,
        logits_row_stride,
        NUM_EXPERTS,
        EXPERTS_PADDED,
        IS_SIGMOID,
        HAS_LOGIT_BIAS,
        HAS_BIAS,
        NUM_GROUPS,
        TOPK_GROUPS,
        SUMS_TWO,
    )
    total = _total(scores, ranks, experts, TOP_K, RENORMALISE, IS_SIGMOID, HAS_BIAS)
    for turn in tl.static_range(TOP_K):
        best, is_best, others = _take_best(ranks, experts)
        weight = _score_of(scores, ranks, is_best, HAS_BIAS) / total * scale
        tl.store(weights_ptr + tokens * TOP_K + turn, weight, mask=mask)
        tl.store(experts_ptr + tokens * TOP_K + turn, best.to(tl.int32), mask=mask)
        ranks = others


@step_kernel
def _sort_experts_kernel(
    experts_ptr,
    rows_ptr,
    tokens_ptr,
    offsets_ptr,
    num_pairs,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_dependents(DEPENDENT)
    await_previous(DEPENDENT)
    mine = tl.program_id(0)
    first = 0
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        experts = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=mine)
        first += tl.sum((experts < mine).to(tl.int32), axis=0)
    tl.store(offsets_ptr + mine, first)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        is_mine = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=-1) == mine
        ranks = tl.cumsum(is_mine.to(tl.int32), axis=0)
        rows = first + ranks - 1
        tl.store(rows_ptr + pairs, rows, mask=is_mine)
        tl.store(tokens_ptr + rows, pairs // TOP_K, mask=is_mine)
        first += tl.sum(is_mine.to(tl.int32), axis=0)
    tl.store(offsets_ptr + mine + 1, first, mask=mine + 1 == tl.num_programs(0))


def route_experts(
    logits: torch.Tensor, top_k: int, rule: RoutingRule, biases: RoutingBiases, is_invariant: bool
) -> Routing:
    """See ops.route_experts."""
    num_tokens, num_experts = logits.shape
    routing = empty_routing(num_tokens, top_k, num_experts, logits.device)
    if not num_tokens:
        routing.offsets.zero_()
        return routing
    padded = max(2, triton.next_power_of_2(num_experts))
    tokens_padded = triton.next_power_of_2(num_tokens)
    chosen_tokens = max(1, (UNALIGNED_VALUES if num_experts % 16 else CHOSEN_VALUES) // padded)  # of a program
    if is_invariant:  # one tile, whose threads add a token's scores in one order
        _choose_and_sort(logits, biases, routing, padded, rule, chosen_tokens)
    elif padded * tokens_padded <= ROUTED_VALUES:
        _route_together(logits, biases, routing, padded, rule)
    else:
        _choose_and_sort(logits, biases, routing, padded, rule, min(chosen_tokens, tokens_padded))
    return routing


def _constants(rule: RoutingRule, biases: RoutingBiases) -> dict[str, bool | int]:
    return {
        "RENORMALISE": rule.renormalises,
        "IS_SIGMOID": rule.score == "sigmoid",
        "HAS_LOGIT_BIAS": biases.of_logits is not None,
        "HAS_BIAS": biases.of_selection is not None,
        "NUM_GROUPS": rule.num_groups,
        "TOPK_GROUPS": rule.topk_groups,
        "SUMS_TWO": rule.group_score == "top2sum",
    }


def _route_together(
    logits: torch.Tensor, biases: RoutingBiases, routing: Routing, padded: int, rule: RoutingRule
) -> None:
    num_tokens, top_k = routing.weights.shape
    block_m = triton.next_power_of_2(num_tokens)
    _route_experts_kernel[(1,)](
        logits,
        biases.of_logits,
        biases.of_selection,
        routing.weights,
        routing.rows,
        routing.tokens,
        routing.offsets,
        logits.stride(0),
        num_tokens,
        rule.scale,
        NUM_EXPERTS=routing.num_experts,
        EXPERTS_PADDED=padded,
        TOP_K=top_k,
        **_constants(rule, biases),
        BLOCK_M=block_m,
        num_warps=min(8, max(1, padded * block_m // 256)),
        **dependent_launch(logits.device),
    )


def _choose_and_sort(
    logits: torch.Tensor, biases: RoutingBiases, routing: Routing, padded: int, rule: RoutingRule, block_m: int
) -> None:
    num_tokens, top_k = routing.weights.shape
    num_experts = routing.num_experts
    experts = torch.empty_like(routing.tokens)
    launch = dependent_launch(logits.device)
    _choose_experts_kernel[(triton.cdiv(num_tokens, block_m),)](
        logits,
        biases.of_logits,
        biases.of_selection,
        experts,
        routing.weights,
        logits.stride(0),
        num_tokens,
        rule.scale,
        NUM_EXPERTS=num_experts,
        EXPERTS_PADDED=padded,
        TOP_K=top_k,
        **_constants(rule, biases),
        BLOCK_M=block_m,
        **launch,
    )
    _sort_experts_kernel[(num_experts,)](
        experts,
        routing.rows,
        routing.tokens,
        routing.offsets,
        num_tokens * top_k,
        TOP_K=top_k,
        BLOCK=min(SORT_BLOCK, max(32, triton.next_power_of_2(num_tokens * top_k))),
        **launch,
    )
