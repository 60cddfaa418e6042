"""Small tensors between host and device without waiting: pinned memory, one copy, one event. Engine thread.

Every step has two such copies, so they go to CUDA's driver: torch takes three times as long to launch one. Pinned
memory and events are used again once the device is past them.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch

_ALIGNMENT = 16  # bytes; kernels assume aligned pointers
_LEAST_BYTES = 4096  # of pinned memory that is used again
_INLINE_BYTES = 1 << 16  # the driver puts so many into its commands, which are copied before the call returns
_MOST_BYTES = 1 << 20  # more are torch's to keep


class Staging:
    """Brings bytes to a tensor. target: [N] uint8.

    Few bytes go to the driver as they are, which sends them with its commands: the copy engine's part takes 8 us of a
    step, theirs 1 to 3. Of more a device copies from pinned memory that is each step's own: nothing that it may still
    read is written again."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target, self._address = target, target.data_ptr()
        self._bytes = None if target.is_cuda else target.numpy()
        self._pool = _pool(target.device, True, len(target))

    def send(self, source: np.ndarray) -> None:
        """To the beginning of the tensor. source: [at most N] uint8, contiguous, free to change afterwards."""
        count = len(source)
        if self._bytes is not None:
            self._bytes[:count] = source
            return
        stream = torch.cuda.current_stream(self._target.device).cuda_stream
        if count <= _INLINE_BYTES:
            address = source.__array_interface__["data"][0]
            _check(_driver().cuMemcpyHtoDAsync_v2(self._address, address, count, stream))
            return
        pinned = self._pool.take()
        pinned.bytes[:count] = source
        _check(_driver().cuMemcpyHtoDAsync_v2(self._address, pinned.address, count, stream))
        pinned.mark(stream)
        self._pool.give(pinned)


class HostCopy:
    """An asynchronous copy of tensors to the host. `lists` waits for the copy, not for work launched after it.

    tensors: of types that NumPy has. is_urgent: the device idles until the copy is read, so the wait spins instead of
    sleeping.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], is_urgent: bool = False) -> None:
        self._event: torch.cuda.Event | None = None
        self._pinned: _Pinned | None = None
        if not tensors or not tensors[0].is_cuda:
            self._arrays = [tensor.numpy().copy() for tensor in tensors]
            return
        places, size = _places([tensor.nbytes for tensor in tensors])
        if size > _MOST_BYTES:
            pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            self._arrays = [host.copy_(t, non_blocking=True).numpy() for host, t in zip(pinned, tensors)]
            self._event = torch.cuda.Event(blocking=not is_urgent, enable_timing=not is_urgent)
            self._event.record()
            return
        device = tensors[0].device
        capacity = max(_LEAST_BYTES, 1 << (size - 1).bit_length())
        self._pool = _pool(device, is_urgent, capacity)
        self._pinned = one = self._pool.take()
        stream = torch.cuda.current_stream(device).cuda_stream
        try:
            for place, tensor in zip(places, tensors):
                if tensor.nbytes:
                    source = tensor.contiguous()  # may be a copy, which must live until the driver has been called
                    _check(
                        _driver().cuMemcpyDtoHAsync_v2(one.address + place, source.data_ptr(), tensor.nbytes, stream)
                    )
        finally:
            one.mark(stream)
        self._event = one.event
        self._arrays = [
            np.ndarray(tuple(tensor.shape), _numpy_type(tensor.dtype), one.bytes, place)
            for place, tensor in zip(places, tensors)
        ]

    def __del__(self) -> None:
        if self._pinned is not None:
            self._pool.give(self._pinned)

    def seconds_since(self, other: HostCopy) -> float | None:
        """Between both copies, as the device saw them, when both have been read; None on a CPU. Neither is urgent."""
        if self._event is None or other._event is None:
            return None
        return other._event.elapsed_time(self._event) * 1e-3

    def rows(self) -> list[bytes]:
        """The rows of the first tensor."""
        if self._event is not None:
            self._event.synchronize()
        return [row.tobytes() for row in self._arrays[0]]

    def lists(self) -> list[list[Any]]:
        if self._event is not None:
            self._event.synchronize()
        return [array.tolist() for array in self._arrays]


class _Pinned:
    """Pinned memory, and an event behind the last copy from or to it."""

    def __init__(self, num_bytes: int, is_urgent: bool) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.bytes, self.address = self.memory.numpy(), self.memory.data_ptr()
        self.event = torch.cuda.Event(blocking=not is_urgent, enable_timing=not is_urgent)
        self.event.record()  # torch makes it now

    @property
    def is_free(self) -> bool:
        return self.event.query()

    def mark(self, stream: int) -> None:
        _check(_driver().cuEventRecord(self.event.cuda_event, stream))


class _Pool:
    """Pinned memory that nobody has, in the order in which it came back. The device may still use some, and is past it
    in that order; torch, which does not know of our copies, would lend it at once. Any thread."""

    def __init__(self, make: Callable[[], _Pinned]) -> None:
        self._make = make
        self._free: deque[_Pinned] = deque()

    def take(self) -> _Pinned:
        """What came back first, if the device is past it, or a new one."""
        try:
            found = self._free.popleft()
        except IndexError:
            return self._make()
        if found.is_free:
            return found
        self._free.appendleft(found)
        return self._make()

    def give(self, pinned: _Pinned) -> None:
        """Its last copy is marked."""
        self._free.append(pinned)


@cache
def _pool(device: torch.device, is_urgent: bool, num_bytes: int) -> _Pool:
    return _Pool(partial(_Pinned, num_bytes, is_urgent))


@cache
def _numpy_type(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t  # device addresses are as wide
    driver.cuMemcpyHtoDAsync_v2.argtypes = pointer, pointer, size, pointer
    driver.cuMemcpyDtoHAsync_v2.argtypes = pointer, pointer, size, pointer
    driver.cuEventRecord.argtypes = pointer, pointer
    return driver


def _check(error: int) -> None:
    """Raise RuntimeError unless a call of the driver has returned 0."""
    if error:
        raise RuntimeError(f"a copy between host and device failed: error {error} of CUDA's driver")


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each of so many bytes begins, aligned, and the bytes of all."""
    places, size = [], 0
    for num_bytes in sizes:
        places.append(size)
        size += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return places, size


def to_device(
    values: list[int] | list[float] | list[list[int]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor of Python numbers, of one dimension or of rows of the same length."""
    if not values:
        return torch.empty(0, dtype=dtype, device=device)
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def pack(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on the device; one copy for all of them, each aligned to 16 bytes."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, size = _places([array.nbytes for array in arrays])
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    bytes_of = staging.numpy()
    for start, array in zip(starts, arrays):
        bytes_of[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    packed = staging.to(device, non_blocking=True)
    return [
        packed[start : start + array.nbytes].view(getattr(torch, array.dtype.name)).view(array.shape)
        for start, array in zip(starts, arrays)
    ]
