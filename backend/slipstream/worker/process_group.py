"""The process group of the ranks of one model: torch.distributed over gloo (tensors on the host) and NCCL (on GPUs).

One per process. All ranks run on this host and meet through a file. Engine thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.core.errors import EngineError
from slipstream.worker.memory_plan import Hardware
from slipstream.worker.symmetric_memory import SymmetricSum, symmetric_sum

T = TypeVar("T")
HOST = torch.device("cpu")
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name until torch 2.12
_MEETING_TIMEOUT = timedelta(seconds=120)  # until all ranks have said where they are
_CONNECT_TIMEOUT = timedelta(seconds=30)  # then; torch cannot be interrupted if one ends meanwhile
_CHECK_PERIOD_S = 0.02
# gloo's own limit: the engine ends ranks that are lost long before (engine/ranks.py)
_COLLECTIVE_TIMEOUT = timedelta(hours=1)


class GroupCollectives:
    """See nn.parallel.Collectives. is_ordered: sums are made in the order of ranks, whatever the size of a tensor;
    a library may cut it and sum the pieces in other orders. symmetric: for small tensors on GPUs.
    """

    def __init__(self, size: int, is_ordered: bool, symmetric: SymmetricSum | None = None) -> None:
        self._size, self._is_ordered, self._symmetric = size, is_ordered, symmetric

    def sum(self, partial: Tensor) -> Tensor:
        if self._is_ordered and self._size > 2:  # of two, the order does not matter
            first, *others = self.gather(partial)
            for part in others:
                first = first + part
            return first
        if self._symmetric is not None and self._symmetric.takes(partial):
            return self._symmetric(partial)
        dist.all_reduce(partial)
        return partial

    def gather(self, own: Tensor) -> Tensor:
        found = own.new_empty(self._size, *own.shape)
        _all_gather(found.flatten(0, 1), own.contiguous())
        return found

    def broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, 0)
        return tensor

    def decide(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, 0, device=HOST)
        return box[0]


class WatchedStore(dist.Store):
    """Another store, in which waiting for a key can be interrupted; torch's own keep the interpreter's lock meanwhile.

    check: called while others are waited for; may raise."""

    def __init__(self, store: dist.Store, check: Callable[[], None]) -> None:
        super().__init__()
        self._store, self._check = store, check

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """timeout: torch's, which is that of connecting. Raises what `check` raises, or EngineError if a rank does not
        come."""
        limit = time.monotonic() + _MEETING_TIMEOUT.total_seconds()
        while not self._store.check(keys):
            self._check()
            if time.monotonic() > limit:
                raise EngineError(f"not all ranks have come in {_MEETING_TIMEOUT.total_seconds():g} s")
            time.sleep(_CHECK_PERIOD_S)


def join(store_path: str, own: Hardware, is_ordered: bool, check: Callable[[], None] | None = None) -> Hardware:
    """Wait for the other ranks; returns `own` with the calls between them. is_ordered: see GroupCollectives.

    store_path: a file that does not exist yet, the same for all ranks. check: called while others are waited for; may
    raise. Raises EngineError if this process is a rank already.
    """
    device, rank, size = own.device, own.parallel.rank, own.parallel.size
    if dist.is_initialized():
        raise EngineError("this process has a model of several ranks already: close it first")
    for library in ("GLOO", "NCCL"):  # all ranks run here; by default both would listen on the network
        os.environ[f"{library}_SOCKET_IFNAME"] = "lo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    file = dist.FileStore(store_path, size)
    store = file if check is None or device.type == "cuda" else WatchedStore(file, check)  # not known to NCCL
    limit = _MEETING_TIMEOUT if store is file else _CONNECT_TIMEOUT
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    dist.distributed_c10d._set_pg_timeout(_COLLECTIVE_TIMEOUT)
    symmetric = None
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device))  # NCCL takes its memory now, before the plan counts what is free
        symmetric = None if is_ordered else symmetric_sum(size, own.dtype, device, _all_agree)
    collectives = GroupCollectives(size, is_ordered, symmetric)
    return replace(own, parallel=replace(own.parallel, collectives=collectives))


def _all_agree(value: bool) -> bool:
    """Whether every rank says so."""
    box = torch.tensor(int(value), dtype=torch.int32)
    dist.all_reduce(box, dist.ReduceOp.MIN)
    return bool(box)


def leave(device: torch.device) -> None:
    """Forget the group, without waiting for the others."""
    if not dist.is_initialized():
        return
    if device.type == "cuda":
        dist.distributed_c10d._abort_process_group()  # destroying NCCL's communicators waits for the other ranks
    else:
        dist.destroy_process_group()
