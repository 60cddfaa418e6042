"""Copies KV blocks between the pool and host memory, as core/host_cache.py orders them. Engine thread.

On a GPU the host never waits. Blocks about to be overwritten are gathered on the step's stream, in microseconds, and
copied on another stream; blocks that are loaded back are copied there too, while earlier steps run, and their step
waits for them on the device. It also waits where more is stored than the buffers hold, until the first of them is free.
Knows tensors only: neither requests nor hashes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.core.host_cache import BlockCopies
from slipstream.worker.host_copy import to_device

if TYPE_CHECKING:
    from slipstream.worker.kv_cache import PlanePool

Pairs = Sequence[tuple[int, int]]  # (device block, host block)
# Blocks travel in chunks of about so many bytes: bounds the memory beside the pool, and fills the bus.
CHUNK_BYTES = 64 << 20
# Chunks on the device, each in its buffer. Stores have more: no step waits for them.
NUM_STORE_BUFFERS, NUM_LOAD_BUFFERS = 4, 2


def buffer_bytes(block_bytes: int) -> int:
    """Device memory that the chunks of a rank's blocks take beside its pool."""
    return (NUM_STORE_BUFFERS + NUM_LOAD_BUFFERS) * _chunk_size(block_bytes) * block_bytes


def _chunk_size(block_bytes: int) -> int:
    return max(1, CHUNK_BYTES // block_bytes)


class HostBlocks:
    """Host memory for num_blocks blocks of a pool, pinned if the pool is on a GPU."""

    def __init__(self, pool: PlanePool, num_blocks: int) -> None:
        self._parts = pool.parts
        device = pool.parts[0].device
        block_bytes = sum(part.shape[0] * part.shape[2] * part.element_size() for part in pool.parts)
        self._chunk_size = _chunk_size(block_bytes)
        self._host = [torch.empty((num_blocks, part.shape[0], part.shape[2]), dtype=part.dtype) for part in pool.parts]
        if device.type == "cuda":
            _pin(self._host)
            weakref.finalize(self, _unpin, self._host)
        self._transfer: _DirectTransfer | _CudaTransfer
        self._transfer = (
            _CudaTransfer(self._host, self._chunk_size, device) if device.type == "cuda" else _DirectTransfer()
        )

    def run(self, copies: BlockCopies) -> None:
        """Make a step's copies: before its kernels are launched, and after those of all earlier steps."""
        for chunk in self._chunks(copies.stores):
            self._transfer.store(self._parts, self._blocks(chunk), self._host, chunk)
        for chunk in self._chunks(copies.loads):
            arrived = self._transfer.load(self._host, chunk)
            blocks = self._blocks(chunk)
            for part, rows in zip(self._parts, arrived):
                part.index_copy_(1, blocks, rows.transpose(0, 1))
            self._transfer.release()

    def _chunks(self, pairs: Pairs) -> Iterator[Pairs]:
        for start in range(0, len(pairs), self._chunk_size):
            yield pairs[start : start + self._chunk_size]

    def _blocks(self, pairs: Pairs) -> Tensor:
        return to_device([block for block, _ in pairs], torch.int64, self._parts[0].device)


def _pin(tensors: Sequence[Tensor]) -> None:
    """Register plain memory with the driver: pin_memory=True would round each tensor up to a power of two."""
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), num_bytes, 0)
        if int(error) != 0:
            reason = f"the driver does not pin {num_bytes} bytes (CUDA error {int(error)}); accepted: less"
            raise ConfigError("kv_cache_host_memory_bytes", num_bytes, reason)


def _unpin(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


class _DirectTransfer:
    """Copies in host memory, for a pool on the CPU."""

    def store(self, parts: Sequence[Tensor], blocks: Tensor, host: list[Tensor], pairs: Pairs) -> None:
        host_blocks = torch.tensor([host_block for _, host_block in pairs])
        for part, stored in zip(parts, host):
            stored.index_copy_(0, host_blocks, part.transpose(0, 1).index_select(0, blocks))

    def load(self, host: list[Tensor], pairs: Pairs) -> list[Tensor]:
        return [stored[[host_block for _, host_block in pairs]] for stored in host]

    def release(self) -> None:
        pass


class _Buffers:
    """Device memory for chunks, used in turn: one is filled again when what was in it has been read."""

    def __init__(self, number: int, host: list[Tensor], chunk_size: int, device: torch.device) -> None:
        self._chunks = [
            [torch.empty((chunk_size, *one.shape[1:]), dtype=one.dtype, device=device) for one in host]
            for _ in range(number)
        ]
        self._is_read = [torch.cuda.Event() for _ in self._chunks]
        self._next = 0

    def take(self, num_blocks: int, stream: torch.cuda.Stream) -> list[Tensor]:
        """The next buffer, for work on `stream`."""
        stream.wait_event(self._is_read[self._next])
        return [rows[:num_blocks] for rows in self._chunks[self._next]]

    def release(self, stream: torch.cuda.Stream) -> None:
        """What was launched on `stream` so far is the last to read the buffer taken last."""
        self._is_read[self._next].record(stream)
        self._next = (self._next + 1) % len(self._chunks)


class _CudaTransfer:
    """Copies on a stream of its own."""

    def __init__(self, host: list[Tensor], chunk_size: int, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._stored = _Buffers(NUM_STORE_BUFFERS, host, chunk_size, device)
        self._loaded = _Buffers(NUM_LOAD_BUFFERS, host, chunk_size, device)

    def store(self, parts: Sequence[Tensor], blocks: Tensor, host: list[Tensor], pairs: Pairs) -> None:
        current = torch.cuda.current_stream(self._device)
        gathered = self._stored.take(len(pairs), current)
        for part, rows in zip(parts, gathered):
            torch.index_select(part.transpose(0, 1), 0, blocks, out=rows)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for rows, stored in zip(gathered, host):
                for row, (_, host_block) in zip(rows, pairs):
                    stored[host_block].copy_(row, non_blocking=True)
        self._stored.release(self._stream)

    def load(self, host: list[Tensor], pairs: Pairs) -> list[Tensor]:
        arrived = self._loaded.take(len(pairs), self._stream)
        with torch.cuda.stream(self._stream):
            for rows, stored in zip(arrived, host):
                for row, (_, host_block) in zip(rows, pairs):
                    row.copy_(stored[host_block], non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return arrived

    def release(self) -> None:
        """Release the buffer of the last `load`, once the work launched so far has read it."""
        self._loaded.release(torch.cuda.current_stream(self._device))
