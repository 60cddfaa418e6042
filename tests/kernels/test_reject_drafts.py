"""reject_drafts: what comes out is distributed as the target, whatever the draft was drawn from (χ²)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from slipstream_kernels import ops

NUM_ROWS, VOCAB = 40_000, 12
FILTERS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 9, "top_p": 0.95, "min_p": 0.02},
}


def columns(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> ops.SamplingMetadata:
    return ops.SamplingMetadata(
        torch.full((NUM_ROWS,), temperature),
        torch.full((NUM_ROWS,), top_k, dtype=torch.int32),
        torch.full((NUM_ROWS,), top_p),
        torch.full((NUM_ROWS,), min_p),
    )


def chi_square(token_ids: torch.Tensor, probs: torch.Tensor) -> float:
    """Over tokens that can occur; infinite if another did."""
    counts = torch.bincount(token_ids, minlength=VOCAB).double()
    expected = probs.double() * len(token_ids)
    possible = expected > 0
    if counts[~possible].sum() > 0:
        return float("inf")
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


LIMIT = 36.0  # 11 degrees of freedom: exceeded once in 6,000 draws


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("likeness", [0.0, 0.7, 1.0])
def test_the_target_is_kept(name: str, likeness: float) -> None:
    """likeness 1: the draft is the target; 0: it has nothing to do with it."""
    generator = torch.Generator().manual_seed(3)
    target, other = torch.randn(2, VOCAB, generator=generator) * 2
    draft = likeness * target + (1 - likeness) * other
    rows = lambda logits: logits.expand(NUM_ROWS, -1).contiguous()  # noqa: E731
    filters = columns(**FILTERS[name])  # type: ignore[arg-type]
    numbers = torch.arange(NUM_ROWS, dtype=torch.int64)
    drawn_from = ops.token_probs(rows(draft), filters)
    drafts = ops.sample(rows(draft), filters, numbers, numbers + 1)
    assert chi_square(drafts, drawn_from[0]) < LIMIT
    drawn = ops.DrawnDrafts(drafts, drawn_from, accept_seeds=~numbers, recover_seeds=numbers ^ 77)
    found = ops.reject_drafts(rows(target), filters, drawn, numbers)
    probs = ops.token_probs(rows(target), filters)[0]
    assert chi_square(found, probs) < LIMIT
    taken = float((found == drafts).double().mean())
    overlap = float(torch.minimum(probs, drawn_from[0]).sum())
    assert taken == pytest.approx(overlap, abs=0.02), "as often as can be"


def test_token_probs_are_what_sample_draws_from() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5)).expand(NUM_ROWS, -1).contiguous()
    filters = columns(0.8, 6, 0.9, 0.05)
    numbers = torch.arange(NUM_ROWS, dtype=torch.int64)
    probs = ops.token_probs(logits, filters)[0]
    assert chi_square(ops.sample(logits, filters, numbers, numbers), probs) < LIMIT
    assert float(probs.sum()) == pytest.approx(1.0) and int((probs > 0).sum()) <= 6


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("drafts.probs: shape", lambda d: {"probs": d.probs[:, 1:]}),
        ("drafts.token_ids: dtype", lambda d: {"token_ids": d.token_ids.int()}),
        ("recover_seeds: shape", lambda d: {"recover_seeds": d.recover_seeds[1:]}),
    ],
)
def test_what_does_not_fit_is_named(name: str, change) -> None:
    logits, numbers, metadata = torch.zeros(3, VOCAB), torch.arange(3), ops.SamplingMetadata(torch.ones(3))
    drafts = ops.DrawnDrafts(numbers, torch.full((3, VOCAB), 1 / VOCAB), numbers, numbers)
    with pytest.raises(ValueError, match=f"^{name}"):
        ops.reject_drafts(logits, metadata, replace(drafts, **change(drafts)), numbers)
    with pytest.raises(ValueError, match=r"^temperature: None"):
        ops.reject_drafts(logits, ops.SamplingMetadata(), drafts, numbers)
