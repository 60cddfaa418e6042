"""The process group of the ranks of one model: torch.distributed over gloo (tensors on the host) and NCCL (on GPUs).

One per process. Engine thread.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.core.errors import EngineError
from slipstream.worker.cores import bind_near
from slipstream.worker.hardware import Hardware
from slipstream.worker.pipe import stage_groups
from slipstream.worker.residency import collect_all
from slipstream.worker.symmetric_memory import SymmetricSum, symmetric_sum

T = TypeVar("T")
HOST = torch.device("cpu")
LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915
IPV6_INTERFACES = Path("/proc/net/if_inet6")
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name until torch 2.12
_MEETING_TIMEOUT = timedelta(seconds=120)  # until all ranks have said where they are
_CONNECT_TIMEOUT = timedelta(seconds=6)  # then, of each of gloo's five tries, which cannot be interrupted if one ends
_CHECK_PERIOD_S = 0.02
# gloo's own limit: the engine ends ranks that are lost long before (engine/ranks.py)
_COLLECTIVE_TIMEOUT = timedelta(hours=1)


class GroupCollectives:
    """See nn.parallel.Collectives. is_ordered: sums are made in the order of ranks, whatever the size of a tensor;
    a library may cut it and sum the pieces in other orders. symmetric: for small tensors on GPUs. group, first: of the
    ranks of a stage, and the number of its first one; None: all ranks.
    """

    def __init__(
        self, size: int, is_ordered: bool, symmetric: SymmetricSum | None = None, group: Any = None, first: int = 0
    ) -> None:
        self._size, self._is_ordered, self.symmetric = size, is_ordered, symmetric
        self._group, self._first = group, first

    def sum(self, partial: Tensor) -> Tensor:
        if self._is_ordered and self._size > 2:  # of two, the order does not matter
            first, *others = self.gather(partial)
            for part in others:
                first = first + part
            return first
        way = None if self.symmetric is None else self.symmetric.way_of(partial)
        if way is not None:
            return way(partial)
        dist.all_reduce(partial, group=self._group)
        return partial

    def gather(self, own: Tensor) -> Tensor:
        found = own.new_empty(self._size, *own.shape)
        _all_gather(found.flatten(0, 1), own.contiguous(), group=self._group)
        return found

    def broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, self._first, group=self._group)
        return tensor

    def decide(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, 0, device=HOST)
        return box[0]

    def any_of(self, value: bool) -> bool:
        return not _all_agree(not value)


class WatchedStore(dist.Store):
    """Another store, in which waiting for a key can be interrupted; torch's own keep the interpreter's lock meanwhile.

    check: called while others are waited for; may raise."""

    def __init__(self, store: Any, check: Callable[[], None]) -> None:
        """store: has set, get, check and add."""
        super().__init__()
        self._store, self._check = store, check

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        found: bytes = self._store.get(key)
        return found

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def clone(self) -> WatchedStore:
        """NCCL's threads want one each; here they share it."""
        return self

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """timeout: torch's, which is that of connecting. Raises what `check` raises, or EngineError if a rank does not
        come."""
        limit = time.monotonic() + _MEETING_TIMEOUT.total_seconds()
        while not self._store.check(keys):
            self._check()
            if time.monotonic() > limit:
                raise EngineError(f"not all ranks have come in {_MEETING_TIMEOUT.total_seconds():g} s")
            time.sleep(_CHECK_PERIOD_S)


def file_store(path: str, hardware: Hardware, check: Callable[[], None] | None = None) -> dist.Store:
    """Where ranks of a host meet. path: a file that does not exist yet, the same for all. check: see WatchedStore."""
    file = dist.FileStore(path, hardware.parallel.num_ranks)
    return file if check is None or hardware.device.type == "cuda" else WatchedStore(file, check)  # untested with NCCL


def join(store: dist.Store, own: Hardware, is_ordered: bool, interface: str = LOOPBACK) -> Hardware:
    """Wait for the other ranks; returns `own` with the calls between them. is_ordered: see GroupCollectives.

    interface: of the network that they share. Raises EngineError if this process is a rank already.
    """
    device, parallel = own.device, own.parallel
    if dist.is_initialized():
        raise EngineError("this process has a model of several ranks already: close it first")
    _bind_to(interface)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    bind_near(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    limit = _CONNECT_TIMEOUT if isinstance(store, WatchedStore) else _MEETING_TIMEOUT
    try:
        dist.init_process_group(
            backend, store=store, rank=parallel.number, world_size=parallel.num_ranks, timeout=limit
        )
    except BaseException:
        dist.distributed_c10d._world.group_count = 0  # it names keys of the store: the next group's would be others
        raise
    group = symmetric = None
    if parallel.num_stages > 1:
        group, pipe = stage_groups(parallel, limit)
        parallel = replace(parallel, pipe=pipe)
    limit_calls(_COLLECTIVE_TIMEOUT.total_seconds())
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device))  # NCCL takes its memory now, before the plan counts what is free
        if not is_ordered and parallel.num_nodes == parallel.num_stages == 1:
            symmetric = symmetric_sum(parallel.rank, parallel.size, own.dtype, device, _all_agree)
    collectives = GroupCollectives(parallel.size, is_ordered, symmetric, group, parallel.stage * parallel.size)
    return replace(own, parallel=replace(parallel, collectives=collectives))


def limit_calls(seconds: float) -> None:
    """Let a call between ranks on hosts fail after so long: that of a rank on another node, which cannot be killed."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def interface_of(address: str) -> str:
    """The network interface with an address of this machine. Raises EngineError if there is none."""
    address = address.removeprefix("::ffff:")  # of IPv4, to a socket of both
    found = _interface_of_ipv6(address) if ":" in address else _interface_of_ipv4(address)
    if found is None:
        raise EngineError(f"no network interface has the address {address}")
    return found


def _interface_of_ipv4(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24]
            except OSError:
                continue  # it has no such address
            if socket.inet_ntoa(found) == address or (name == LOOPBACK and address.startswith("127.")):
                return name
    return None


def _interface_of_ipv6(address: str) -> str | None:
    """By the kernel's table: lines of 32 digits, index, prefix, scope, flags and name."""
    digits = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    for fields in map(str.split, IPV6_INTERFACES.read_text().splitlines() if IPV6_INTERFACES.exists() else ()):
        if fields[0] == digits:
            return fields[-1]
    return None


def _bind_to(interface: str) -> None:
    """By default gloo and NCCL listen on every network. A choice by NCCL's own variables stays, between nodes."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if interface == LOOPBACK or os.environ.get(name, LOOPBACK) == LOOPBACK:
            os.environ[name] = interface


def _all_agree(value: bool) -> bool:
    """Whether every rank says so."""
    box = torch.tensor(int(value), dtype=torch.int32)
    dist.all_reduce(box, dist.ReduceOp.MIN)
    return bool(box)


def leave(device: torch.device) -> None:
    """Forget the group, without waiting for the others. NCCL waits until all CUDA graphs that call it are gone."""
    if not dist.is_initialized():
        return
    collect_all()
    if device.type == "cuda":
        dist.distributed_c10d._abort_process_group()  # destroying NCCL's communicators waits for the other ranks
    else:
        dist.destroy_process_group()
