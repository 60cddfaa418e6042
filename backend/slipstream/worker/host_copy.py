"""Small tensors between host and device without waiting: pinned memory, one copy, one event. Engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_ALIGNMENT = 16  # bytes; kernels assume aligned pointers


class HostCopy:
    """An asynchronous copy of tensors to the host. `lists` waits for the copy, not for work launched after it.

    is_urgent: the device idles until the copy is read, so the wait spins instead of sleeping.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], is_urgent: bool = False) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = [tensor.clone() for tensor in tensors if not tensor.is_cuda]
        if tensors and tensors[0].is_cuda:
            pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            self._tensors = [host.copy_(t, non_blocking=True) for host, t in zip(pinned, tensors)]
            self._event = torch.cuda.Event(blocking=not is_urgent, enable_timing=not is_urgent)
            self._event.record()

    def seconds_since(self, other: HostCopy) -> float | None:
        """Between both copies, as the device saw them, when both have been read; None on a CPU. Neither is urgent."""
        if self._event is None or other._event is None:
            return None
        return other._event.elapsed_time(self._event) * 1e-3

    def rows(self) -> list[bytes]:
        """The rows of the first tensor."""
        if self._event is not None:
            self._event.synchronize()
        return [row.tobytes() for row in self._tensors[0].numpy()]

    def lists(self) -> list[list[Any]]:
        if self._event is not None:
            self._event.synchronize()
        return [tensor.tolist() for tensor in self._tensors]


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
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    bytes_of = staging.numpy()
    for start, array in zip(starts, arrays):
        bytes_of[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    packed = staging.to(device, non_blocking=True)
    return [
        packed[start : start + array.nbytes].view(getattr(torch, array.dtype.name)).view(array.shape)
        for start, array in zip(starts, arrays)
    ]
