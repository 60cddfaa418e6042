"""What a load leaves of the device's memory: no holes between weights."""

from __future__ import annotations

import os

import pytest
import torch
from slipstream.worker import residency
from slipstream.worker.residency import pages_without_holes

MIB = 1 << 20
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def repack_as_a_load_does() -> list[torch.Tensor]:
    """Large tensors are replaced one after the other by some that are a little larger, with small ones between."""
    stored = [torch.empty(96 * MIB, dtype=torch.uint8, device="cuda") for _ in range(16)]
    kept = []
    for index in range(16):
        kept.append(torch.empty(100 * MIB, dtype=torch.uint8, device="cuda"))
        stored[index] = torch.empty(0)
        kept.append(torch.empty(60 * MIB, dtype=torch.uint8, device="cuda"))
    return kept


def holes() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def test_no_holes_are_left_between_weights() -> None:
    before = holes()
    with pages_without_holes(torch.device("cuda")):
        kept = repack_as_a_load_does()
    assert holes() - before < 250 * MIB
    del kept
    before, kept = holes(), repack_as_a_load_does()
    assert holes() - before > 500 * MIB, "what segments of fixed sizes leave"
    del kept


def test_a_user_s_settings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, residency.ALLOCATOR_VARIABLES[0], "expandable_segments:False")
    before = holes()
    with pages_without_holes(torch.device("cuda")):
        kept = repack_as_a_load_does()
    assert holes() - before > 500 * MIB
    del kept
