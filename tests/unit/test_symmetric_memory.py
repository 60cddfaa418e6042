"""Where ranks of one host find each other's mailboxes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from slipstream.worker import symmetric_memory
from slipstream.worker.symmetric_memory import SymmetricSum


@pytest.mark.parametrize(("offset", "is_refused"), [(0, False), (256, False), (16, True)])
def test_mailboxes_begin_with_a_line(offset: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of 128 bytes across two of the memory's comes in two parts, of which the number may be the first. PyTorch
    promises nothing of where a tensor lies in what ranks share; here the second rank sees the first's elsewhere."""
    monkeypatch.setattr(SymmetricSum, "__init__", lambda self: None)
    monkeypatch.setattr(symmetric_memory.rank_sum, "refusal", lambda *_: None)
    symmetric, mailbox = SymmetricSum(), torch.empty(1024, dtype=torch.uint8)
    first = -(-mailbox.data_ptr() // 128) * 128 - mailbox.data_ptr()
    symmetric._mailbox, symmetric._buffer = mailbox[first + offset :], torch.empty(8)
    symmetric._rank, symmetric._num_ranks, symmetric._device, symmetric._group = 1, 2, torch.device("cpu"), "0"
    shared = SimpleNamespace(buffer_ptrs=[1 << 21, mailbox.data_ptr() + first])
    monkeypatch.setattr("torch.distributed._symmetric_memory.rendezvous", lambda *_: shared)
    symmetric.connect()
    assert symmetric._mailboxes == [(1 << 21) + offset, symmetric._mailbox.data_ptr()]
    assert (symmetric.refusal() is not None) == is_refused
