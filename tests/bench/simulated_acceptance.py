"""Acceptance by a profile instead of by the model's word, for benchmarks with random weights.

A random EAGLE head is sure of anything: it is given the profile's own rates as its confidence in each guess, so that
its trees lie where tokens are taken, as a trained head's do. Everything about a draft's tree is known on the device
alone when steps are launched ahead, so the way through it is found there: by one small kernel on a GPU, which is all
that the simulation costs a step, by torch elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import triton
import triton.language as tl
from profiles import PROFILES
from slipstream.nn.batch import ForwardBatch
from slipstream.worker.host_copy import to_device
from slipstream.worker.spec_decode import verifier
from slipstream.worker.spec_decode.eagle import EagleDrafter
from slipstream.worker.spec_decode.interface import PROPOSERS, SpeculatorContext
from slipstream.worker.spec_decode.verification import Verification
from slipstream_kernels import ops
from slipstream_kernels.triton.interpreter import IS_INTERPRETING

MAX_ROWS = 64  # of a request
_NEVER = 1 << 30  # a rank that no guess has
_LEAST_RATE = 0.01  # of ranks that a profile does not list


class SimulatedVerification(Verification):
    """Takes drafts by a profile, along first children. rates: as in profiles.py."""

    rates: ClassVar[Sequence[Sequence[float]]] = []
    dice = np.random.default_rng(0)

    def accept(self, batch: ForwardBatch, *arguments: Any) -> ops.AcceptedRows:
        if self.num_drafts:  # not warming up
            counts = list(self.num_drafts)
            numbers = [*self._right_ranks(len(counts)), *self.first_rows, *counts]
            on_device = to_device(numbers, torch.int64, batch.token_ids.device)
            walk = _walk_by_kernel if batch.token_ids.is_cuda or IS_INTERPRETING else _walk
            self._marks = walk(batch, on_device, len(counts), self.num_rows)
        return super().accept(batch, *arguments)

    def _right_ranks(self, num_requests: int) -> list[int]:
        """Which of a node's guesses, likeliest first, is right, by request and depth."""
        ranks = np.full((num_requests, len(self.rates)), _NEVER)
        for depth, rates in enumerate(self.rates):
            found = np.searchsorted(np.cumsum(rates), self.dice.random(num_requests), side="right")
            ranks[:, depth] = np.where(found < len(rates), found, _NEVER)
        return ranks.flatten().tolist()


class CalibratedEagle(EagleDrafter):
    """As sure of the guess of each rank as the profile says that it is right."""

    def __init__(self, context: SpeculatorContext) -> None:
        super().__init__(context)
        rates = [*PROFILES["eagle"][0], *[_LEAST_RATE] * MAX_ROWS][: self._top_k]
        self._sure = to_device(rates, torch.float32, context.hardware.device).log()

    def _candidates(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, values = super()._candidates(features)
        return tokens, self._sure.to(values.dtype).expand_as(values)


def simulate() -> None:
    """From now on in this process."""
    verifier.Verification = SimulatedVerification  # type: ignore[misc]
    PROPOSERS._entries["eagle"] = CalibratedEagle


def _walk(batch: ForwardBatch, numbers: torch.Tensor, num_requests: int, num_rows: int) -> torch.Tensor:
    """Marks of all sampled rows. numbers: ranks by request and depth, first rows, numbers of drafts."""
    device = numbers.device
    right, firsts, counts = numbers[: -2 * num_requests], *numbers[-2 * num_requests :].view(2, -1)
    rows = torch.arange(MAX_ROWS, device=device)
    inside = rows <= counts[:, None]
    places = (firsts[:, None] + rows).clamp(max=num_rows - 1)
    bits = torch.ones_like(rows) << rows
    words = (bits | (bits - 1)).expand_as(places)
    if batch.tree_mask is not None:
        inner = batch.logits_indices[:num_rows][places].clamp(max=len(batch.tree_mask) - 1)  # a prompt has no word
        words = batch.tree_mask[inner]
    words = torch.where(inside, words, 0)
    word, chosen = torch.ones_like(firsts), torch.zeros_like(inside)
    for rank in right.view(num_requests, -1).T:
        is_child = ((words ^ bits) == word[:, None]) & inside & (rows > 0)
        is_right = is_child & (is_child.cumsum(dim=1) - 1 == rank[:, None])
        chosen |= is_right
        word = (words * is_right).sum(dim=1)  # 0, which nothing follows, where no guess is right
    marks = torch.zeros(num_rows + 1, dtype=torch.int8, device=device)  # the last for what is nobody's row
    own = torch.where(inside, firsts[:, None] + rows, num_rows).flatten()
    return marks.scatter_(0, own, torch.where(chosen, 1, -1).to(torch.int8).flatten())[:num_rows]


def _walk_by_kernel(batch: ForwardBatch, numbers: torch.Tensor, num_requests: int, num_rows: int) -> torch.Tensor:
    """The same in one launch."""
    marks = torch.empty(num_rows, dtype=torch.int8, device=numbers.device)
    has_tree = batch.tree_mask is not None
    depth = len(numbers) // num_requests - 2
    masks = batch.tree_mask if has_tree else numbers
    _walk_kernel[(num_requests,)](
        masks, batch.logits_indices, numbers, marks, num_requests, len(masks), depth, has_tree, MAX_ROWS
    )
    return marks


@triton.jit(do_not_specialize=["num_requests", "num_words"])
def _walk_kernel(
    tree_mask,
    logits_indices,
    numbers,
    marks,
    num_requests,
    num_words,
    DEPTH: tl.constexpr,
    HAS_TREE: tl.constexpr,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0)
    first = tl.load(numbers + num_requests * DEPTH + request)
    count = tl.load(numbers + num_requests * (DEPTH + 1) + request)
    rows = tl.arange(0, ROWS)
    inside = rows <= count
    bits = tl.full([ROWS], 1, tl.int64) << rows.to(tl.int64)
    if HAS_TREE:
        places = tl.load(logits_indices + first + rows, mask=inside, other=0)
        words = tl.load(tree_mask + places, mask=inside & (places < num_words), other=0)  # a prompt has none
    else:
        words = tl.where(inside, bits | (bits - 1), 0)
    word = tl.full([], 1, tl.int64)
    chosen = rows < 0
    for depth in tl.static_range(DEPTH):
        rank = tl.load(numbers + request * DEPTH + depth)
        is_child = ((words ^ bits) == word) & inside & (rows > 0)
        is_right = is_child & (tl.cumsum(is_child.to(tl.int32), 0) - 1 == rank)
        chosen = chosen | is_right
        word = tl.sum(tl.where(is_right, words, 0), 0)
    tl.store(marks + first + rows, tl.where(chosen, 1, -1).to(tl.int8), mask=inside)
