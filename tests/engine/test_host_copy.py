"""Copies between host and device: memory that the device may still read or write is not used again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from slipstream.worker.host_copy import _INLINE_BYTES, HostCopy, Staging, _Pool

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BUSY_CYCLES = 200_000_000  # about a tenth of a second


def test_memory_is_used_again_once_the_device_is_past_it() -> None:
    def use(make: Callable[[], Any]) -> Any:
        pool._make = make
        found = pool.take()
        pool.give(found)
        return found

    pool = _Pool(partial(pytest.fail, "not asked yet"))
    first, second, third = (use(lambda: SimpleNamespace(is_free=False)) for _ in range(3))
    assert len({id(first), id(second), id(third)}) == 3
    second.is_free = True  # copies end in their order: it is not asked before the first
    fourth = use(lambda: SimpleNamespace(is_free=False))
    first.is_free = True
    assert [use(lambda: pytest.fail("one is free")) for _ in range(2)] == [first, second]
    assert list(pool._free) == [third, fourth, first, second]


def test_on_a_cpu() -> None:
    target, source = torch.zeros(8, dtype=torch.uint8), np.arange(5, dtype=np.uint8)
    Staging(target).send(source)
    source[:] = 9
    assert target.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    tensor = torch.arange(3)
    copy = HostCopy((tensor, tensor[:0]))
    tensor.zero_()
    assert copy.lists() == [[0, 1, 2], []] and copy.seconds_since(copy) is None


@needs_gpu
@pytest.mark.parametrize("count", [3000, _INLINE_BYTES, _INLINE_BYTES + 1, 300_000])
def test_what_is_sent_arrives_behind_a_busy_device(count: int) -> None:
    """Each step's bytes as they were when it was sent; nothing waits for the device."""
    target = torch.zeros(count + 100, dtype=torch.uint8, device="cuda")  # no other memory is of this size
    staging, source, found = Staging(target), np.zeros(count, dtype=np.uint8), []
    for round_of in range(3):
        torch.cuda._sleep(BUSY_CYCLES)
        busy = torch.cuda.Event()
        busy.record()
        for step in range(7):
            source[:] = 7 * round_of + step
            staging.send(source)
            found.append(target.clone())
        assert not busy.query(), "seven are sent before the device begins with the first"
        torch.cuda.synchronize()
    assert [(one[0].item(), one[count - 1].item(), one[count].item()) for one in found] == [
        (n, n, 0) for n in range(21)
    ]
    assert len(staging._pool._free) <= 7, "those of the first round are free in the second"


@needs_gpu
def test_memory_of_a_sender_that_is_gone_is_not_lent_before_it_was_read() -> None:
    target = torch.zeros(100_000, dtype=torch.uint8, device="cuda")
    staging, source = Staging(target), np.full(100_000, 7, dtype=np.uint8)
    torch.cuda._sleep(BUSY_CYCLES)
    staging.send(source)
    del staging
    others = [torch.empty(100_000, dtype=torch.uint8, pin_memory=True).fill_(9) for _ in range(8)]
    assert set(target.tolist()) == {7} and len(others) == 8


@needs_gpu
@pytest.mark.parametrize("is_urgent", [False, True])
def test_copies_are_read_in_any_order_or_never(is_urgent: bool) -> None:
    """Those that nobody reads may still be underway when the next ones begin."""
    device = torch.device("cuda", torch.cuda.current_device())
    for _ in range(3):
        torch.cuda._sleep(BUSY_CYCLES)
        copies = []
        for step in range(12):
            ids = torch.full((5,), step, device=device)
            columns = torch.arange(6, dtype=torch.float32, device=device).view(2, 3).t() + step  # not contiguous
            copies.append(HostCopy((ids, columns, ids[:0]), is_urgent))
            ids.fill_(-1)
            del ids, columns
        del copies[::3]
        for step, copy in reversed(list(zip([n for n in range(12) if n % 3], copies, strict=True))):
            expected = [[0.0 + step, 3.0 + step], [1.0 + step, 4.0 + step], [2.0 + step, 5.0 + step]]
            assert copy.lists() == [[step] * 5, expected, []]
            assert copy.rows()[0] == np.int64(step).tobytes()


@needs_gpu
def test_the_device_tells_the_time_between_copies() -> None:
    value = torch.zeros(1, device="cuda")
    first = HostCopy((value,))
    torch.cuda._sleep(BUSY_CYCLES)
    second = HostCopy((value,))
    for copy in (first, second):
        copy.lists()
    seconds = second.seconds_since(first)
    assert seconds is not None and 0.02 < seconds < 1.0
    others = [HostCopy((value,)) for _ in range(4)]  # the events of both are still theirs
    assert second.seconds_since(first) == seconds and len(others) == 4


@needs_gpu
def test_large_copies() -> None:
    rows = torch.randn(3, 200_000, device="cuda")
    copy = HostCopy((rows,))
    assert b"".join(copy.rows()) == rows.cpu().numpy().tobytes()
