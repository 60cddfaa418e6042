"""The ranks of a model as threads of this process, for tests of what they compute together: no process group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from slipstream.nn.parallel import Parallel
from torch import Tensor

T = TypeVar("T")
TIMEOUT_S = 60.0


class ThreadCollectives:
    """See nn.parallel.Collectives. `shared`: one list and one barrier for all ranks."""

    def __init__(self, rank: int, shared: tuple[list[object], threading.Barrier]) -> None:
        self._rank, (self._values, self._barrier) = rank, shared

    def _all(self, value: object) -> list[object]:
        self._values[self._rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()  # nobody writes before all have read
        return found

    def sum(self, partial: Tensor) -> Tensor:
        return torch.stack(self._all(partial.clone())).sum(0)  # type: ignore[arg-type]

    def gather(self, own: Tensor) -> Tensor:
        return torch.stack(self._all(own.clone()))  # type: ignore[arg-type]

    def broadcast(self, tensor: Tensor) -> Tensor:
        return self._all(tensor)[0]  # type: ignore[return-value]

    def decide(self, value: T) -> T:
        return self._all(value)[0]  # type: ignore[return-value]

    def any_of(self, value: bool) -> bool:
        return any(self._all(value))


def parallels(size: int) -> list[Parallel]:
    shared: tuple[list[object], threading.Barrier] = [None] * size, threading.Barrier(size, timeout=TIMEOUT_S)
    return [Parallel(rank, size, ThreadCollectives(rank, shared)) for rank in range(size)]


def on_each(ranks: Sequence[T], run: Callable[[T], Tensor]) -> list[Tensor]:
    """What `run` returns for each rank, all at once, with one thread each: more would wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(run, ranks))
    finally:
        torch.set_num_threads(num_threads)
