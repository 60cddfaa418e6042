"""Copies KV blocks between the pool and host memory, as core/host_cache.py orders them. Engine thread.

On a GPU the host never waits. Blocks about to be overwritten are gathered on the step's stream, in microseconds, and
copied on another stream; blocks that are loaded back are copied there too, while earlier steps run, and their step
waits for them on the device. Knows tensors only: neither requests nor hashes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.core.host_cache import BlockCopies
from slipstream.worker.host_copy import to_device
from slipstream.worker.kv_cache import PlanePool

Pairs = Sequence[tuple[int, int]]  # (device block, host block)
# Blocks travel in chunks of about so many bytes: bounds the memory beside the pool, and fills the bus.
CHUNK_BYTES = 64 << 20


class HostBlocks:
    """Host memory for num_blocks blocks of a pool, pinned if the pool is on a GPU."""

    def __init__(self, pool: PlanePool, num_blocks: int) -> None:
        self._parts = pool.parts
        device = pool.parts[0].device
        block_bytes = sum(part.shape[0] * part.shape[2] * part.element_size() for part in pool.parts)
        self._chunk_size = max(1, CHUNK_BYTES // block_bytes)
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
            blocks = self._blocks(chunk)
            self._transfer.store(
                [part.transpose(0, 1).index_select(0, blocks) for part in self._parts], self._host, chunk
            )
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

    def store(self, gathered: list[Tensor], host: list[Tensor], pairs: Pairs) -> None:
        for rows, stored in zip(gathered, host):
            for row, (_, host_block) in zip(rows, pairs):  # one by one: a later pair may reuse an earlier one's block
                stored[host_block].copy_(row)

    def load(self, host: list[Tensor], pairs: Pairs) -> list[Tensor]:
        return [stored[[host_block for _, host_block in pairs]] for stored in host]

    def release(self) -> None:
        pass


class _CudaTransfer:
    """Copies on a stream of its own. Loaded chunks alternate between two buffers: one is filled while one is read."""

    def __init__(self, host: list[Tensor], chunk_size: int, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers = [
            [torch.empty((chunk_size, *one.shape[1:]), dtype=one.dtype, device=device) for one in host]
            for _ in range(2)
        ]
        self._is_free = [torch.cuda.Event() for _ in self._buffers]
        self._next_buffer = 0

    def store(self, gathered: list[Tensor], host: list[Tensor], pairs: Pairs) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for rows, stored in zip(gathered, host):
                rows.record_stream(self._stream)
                for row, (_, host_block) in zip(rows, pairs):
                    stored[host_block].copy_(row, non_blocking=True)

    def load(self, host: list[Tensor], pairs: Pairs) -> list[Tensor]:
        arrived = [buffer[: len(pairs)] for buffer in self._buffers[self._next_buffer]]
        self._stream.wait_event(self._is_free[self._next_buffer])
        with torch.cuda.stream(self._stream):
            for rows, stored in zip(arrived, host):
                for row, (_, host_block) in zip(rows, pairs):
                    row.copy_(stored[host_block], non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return arrived

    def release(self) -> None:
        """Release the buffer of the last `load`, once the work launched so far has read it."""
        self._is_free[self._next_buffer].record(torch.cuda.current_stream(self._device))
        self._next_buffer = 1 - self._next_buffer
