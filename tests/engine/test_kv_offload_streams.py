"""The streams of the copies between pool and host memory, without a GPU: nothing is touched before its turn."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import stream_races
import torch
from slipstream.core.host_cache import BlockCopies
from slipstream.worker import kv_offload
from slipstream.worker.kv_cache import PlanePool
from slipstream.worker.kv_offload import HostBlocks

NUM_BLOCKS, NUM_HOST_BLOCKS = 24, 40


class Steps:
    """Steps that write device blocks behind copies, and what both memories hold then."""

    def __init__(self) -> None:
        self._pool = PlanePool([], [torch.zeros(2, NUM_BLOCKS, 4), torch.zeros(3, NUM_BLOCKS, 8)])
        self._blocks = HostBlocks(self._pool, NUM_HOST_BLOCKS)
        host, cpu = self._blocks._host, torch.device("cpu")
        self._blocks._transfer = kv_offload._CudaTransfer(host, self._blocks._chunk_size, cpu)
        self.device, self.host, self._num_written = [0] * NUM_BLOCKS, dict[int, int](), 0

    def draw_and_run(self, dice: random.Random) -> None:
        """Up to 23 blocks are stored and as many loaded, more than the buffers hold; then four are written."""
        host_blocks = dice.sample(range(NUM_HOST_BLOCKS), dice.randrange(1, NUM_BLOCKS))
        stores = list(zip(dice.sample(range(NUM_BLOCKS), len(host_blocks)), host_blocks))
        known = [*self.host, *host_blocks]
        loads = [(block, dice.choice(known)) for block in dice.sample(range(NUM_BLOCKS), dice.randrange(NUM_BLOCKS))]
        self.run(BlockCopies(stores, loads), dice.sample(range(NUM_BLOCKS), 4))

    def run(self, copies: BlockCopies, written: list[int]) -> None:
        self._blocks.run(copies)
        for block, host_block in copies.stores:
            self.host[host_block] = self.device[block]
        for block, host_block in copies.loads:
            self.device[block] = self.host[host_block]
        for block in written:
            self._num_written += 1
            self.device[block] = self._num_written
            for part in self._pool.parts:
                part[:, block].fill_(self._num_written)

    def check(self) -> None:
        for part in self._pool.parts:
            assert part[0, :, 0].tolist() == part[-1, :, -1].tolist() == self.device


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kv_offload, "CHUNK_BYTES", 2 * 128)  # of two blocks
    with stream_races.watched():
        yield


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("seed", range(3))
def test_each_stream_waits_for_what_it_touches(seed: int) -> None:
    """Also where a step copies more chunks than there are buffers."""
    dice, steps = random.Random(seed), Steps()
    for _ in range(12):
        steps.draw_and_run(dice)
        steps.check()


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize(("chunk_bytes", "num_blocks"), [(3 * 128 + 127, 3), (100, 1)])
def test_the_plan_knows_what_the_buffers_take(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, num_blocks: int
) -> None:
    monkeypatch.setattr(kv_offload, "CHUNK_BYTES", chunk_bytes)
    transfer = Steps()._blocks._transfer
    assert isinstance(transfer, kv_offload._CudaTransfer)
    chunks = [rows for buffers in (transfer._stored, transfer._loaded) for rows in buffers._chunks]
    assert sum(part.nbytes for rows in chunks for part in rows) == kv_offload.buffer_bytes(128) == 6 * num_blocks * 128


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("broken", ["take", "release"])
def test_a_buffer_that_is_used_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    if broken == "take":
        monkeypatch.setattr(stream_races.Stream, "wait_event", lambda stream, event: None)
    else:
        monkeypatch.setattr(stream_races.Event, "record", lambda event, stream: None)
    dice, steps = random.Random(0), Steps()
    with pytest.raises(stream_races.RaceError):
        for _ in range(12):
            steps.draw_and_run(dice)
