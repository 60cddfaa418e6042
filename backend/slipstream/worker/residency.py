"""Where the weights of a model that sleeps are, and memory given back to device and system. Engine thread.

Weights come back into the same storages, but at other addresses: what holds addresses (CUDA graphs, tables of
pointers) has to be made again. The worker therefore drops everything but the weights before.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # by which users set PyTorch's allocator
_is_frozen = False  # by `freeze`: the garbage collector is the process's, and so is this


@contextmanager
def pages_without_holes(device: torch.device) -> Iterator[None]:
    """What is allocated within lies in segments that grow and shrink by pages, and what is freed is the device's again.

    In segments of fixed sizes, weights that are repacked as they are loaded lie where larger ones have been: those of
    DeepSeek-V3 in 4 bits left 22 of 109 GiB of each of four GPUs in holes, and the KV pool had no room. A user's own
    settings are kept.
    """
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if device.type != "cuda" or change is None or any(name in os.environ for name in ALLOCATOR_VARIABLES):
        yield
        return
    change("expandable_segments:True")
    try:
        yield
    finally:
        change("expandable_segments:False")
        torch.cuda.empty_cache()


class HostWeights:
    """The contents of tensors in host memory, while their storages are empty. Views of a storage stay its views."""

    @torch.inference_mode()
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._storages: list[tuple[UntypedStorage, Tensor]] = []
        known: set[int] = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or storage.data_ptr() in known:
                continue
            known.add(storage.data_ptr())
            self._storages.append((storage, _bytes_of(storage).to("cpu", copy=True)))
        for storage, _ in self._storages:
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        return sum(copy.numel() for _, copy in self._storages)

    @torch.inference_mode()
    def restore(self) -> None:
        """Fill the storages again. All are empty again if the device has no room (torch.OutOfMemoryError)."""
        try:
            for storage, copy in self._storages:
                storage.resize_(copy.numel())
                _bytes_of(storage).copy_(copy)
        except BaseException:
            for storage, _ in self._storages:
                storage.resize_(0)
            raise


def give_memory_back(device: torch.device) -> bool:
    """Free what nothing refers to any more, and leave it to others. Returns whether objects had been frozen for the
    garbage collector, which is undone: a frozen cycle would never be freed."""
    was_frozen = _collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    else:
        trim_heap()
    return was_frozen


def collect_all() -> None:
    """Free what nothing refers to any more but itself, also what was frozen for the garbage collector. Waits for no
    device."""
    if _collect():
        _freeze()


def freeze() -> None:
    """What there is lives for ever: the garbage collector does not look at it again."""
    gc.collect()
    _freeze()


def _freeze() -> None:
    global _is_frozen
    gc.freeze()
    _is_frozen = True


def _collect() -> bool:
    """Collect what was frozen here, too. Returns whether anything was. What others froze stays so, such as the modules
    of a process: they take half a second to look through, and nothing of a model is among them."""
    global _is_frozen
    was_frozen, _is_frozen = _is_frozen, False
    if was_frozen:
        gc.unfreeze()
    gc.collect()
    return was_frozen


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def trim_heap() -> None:
    """glibc keeps freed blocks of up to 32 MiB for itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
