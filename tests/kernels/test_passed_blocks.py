"""Attention with a window reads no block that the window has passed: another request may hold it by now, or NaN."""

from __future__ import annotations

import pytest
import torch
from slipstream_kernels import ops

WINDOW, SIZE, HEADS, WIDTH = 9, 16, 2, 64


@pytest.mark.parametrize("query_len", [1, 3, 20])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("op", ["paged", "invariant", "decode"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_blocks_that_a_window_has_passed(
    device: torch.device, backend: str, op: str, soft_cap: float | None, query_len: int
) -> None:
    if op == "decode" and backend == "triton":
        pytest.skip("there is no decode attention in Triton-lang")
    torch.manual_seed(0)
    seq_len = 100
    key, value = torch.randn(2, 9, HEADS, SIZE, WIDTH).to(device)
    q = torch.randn(query_len, 2 * HEADS, WIDTH).to(device)
    tables = torch.tensor([[3, 1, 4, 0, 5, 2, 6]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, query_len], dtype=torch.int32, device=device)
    lens = torch.tensor([seq_len], dtype=torch.int32, device=device)

    def attend(block_tables: torch.Tensor) -> torch.Tensor:
        metadata = ops.AttentionMetadata(block_tables, starts, lens, query_len, seq_len)
        options = ops.AttentionOptions(0.125, WINDOW, soft_cap)
        run = {"paged": ops.paged_attention, "invariant": ops.invariant_attention, "decode": ops.decode_attention}[op]
        return run(q, ops.KvCache(key, value), metadata, options, backend=backend)

    expected = attend(tables)
    passed = (seq_len - query_len - WINDOW + 1) // SIZE
    key[8] = value[8] = float("nan")
    reused = tables.clone()
    reused[0, :passed] = 8
    assert passed >= 4 and torch.equal(attend(reused), expected) and expected.isfinite().all()
