"""The process group of the ranks of one model: torch.distributed over gloo (tensors on the host) and NCCL (on GPUs).

One per process. All ranks run on this host and meet through a file. Engine thread.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.core.errors import EngineError
from slipstream.worker.memory_plan import Hardware
from slipstream.worker.symmetric_memory import SymmetricSum, symmetric_sum

T = TypeVar("T")
HOST = torch.device("cpu")
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name until torch 2.12
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


def join(store_path: str, own: Hardware, is_ordered: bool) -> Hardware:
    """Wait for the other ranks; returns `own` with the calls between them. is_ordered: see GroupCollectives.

    store_path: a file that does not exist yet, the same for all ranks. Raises EngineError if this process is a rank
    already.
    """
    device, rank, size = own.device, own.parallel.rank, own.parallel.size
    if dist.is_initialized():
        raise EngineError("this process has a model of several ranks already: close it first")
    for library in ("GLOO", "NCCL"):  # all ranks run here; by default both would listen on the network
        os.environ[f"{library}_SOCKET_IFNAME"] = "lo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.FileStore(store_path, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_COLLECTIVE_TIMEOUT)
    symmetric = None
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device))  # NCCL takes its memory now, before the plan counts what is free
        symmetric = None if is_ordered else symmetric_sum(size, own.dtype, device)
    collectives = GroupCollectives(size, is_ordered, symmetric)
    return replace(own, parallel=replace(own.parallel, collectives=collectives))


def leave(device: torch.device) -> None:
    """Forget the group, without waiting for the others."""
    if not dist.is_initialized():
        return
    if device.type == "cuda":
        dist.distributed_c10d._abort_process_group()  # destroying NCCL's communicators waits for the other ranks
    else:
        dist.destroy_process_group()
