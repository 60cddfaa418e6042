"""The groups of ranks of a model in stages: one a stage, and one for each way from a rank to its next stage.

Engine thread. A way has a group of its own: what a stage waits for must not hold up what it sends.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from slipstream.nn.parallel import Parallel


class GroupPipe:
    """See nn.parallel.Pipe. ways: the groups to the next stage and from the one before, each with the other rank."""

    def __init__(self, to_next: tuple[Any, int], from_previous: tuple[Any, int], most_underway: int) -> None:
        self._to_next, self._from_previous, self._most = to_next, from_previous, most_underway
        self._underway: deque[tuple[Any, Tensor]] = deque()

    def send(self, rows: Tensor) -> None:
        group, rank = self._to_next
        self._wait_until(self._most - 1)
        self._underway.append((dist.isend(rows, rank, group=group), rows))

    def receive(self, rows: Tensor) -> Tensor:
        group, rank = self._from_previous
        dist.recv(rows, rank, group=group)
        return rows

    def drain(self) -> None:
        self._wait_until(0)

    def _wait_until(self, num_underway: int) -> None:
        while len(self._underway) > num_underway:
            self._underway.popleft()[0].wait()


def stage_groups(parallel: Parallel, timeout: timedelta) -> tuple[Any, GroupPipe]:
    """The group of this rank's stage, and its pipe. All ranks call it: each helps to make every group."""
    size, num_stages = parallel.size, parallel.num_stages
    of_stages = [
        dist.new_group([stage * size + rank for rank in range(size)], timeout=timeout) for stage in range(num_stages)
    ]
    ways = {}
    for number in range(parallel.num_ranks):
        following = (number + size) % parallel.num_ranks
        ways[number] = dist.new_group([number, following], timeout=timeout), following
    own, previous = parallel.number, (parallel.number - size) % parallel.num_ranks
    pipe = GroupPipe(ways[own], (ways[previous][0], previous), num_stages)
    return of_stages[parallel.stage], pipe
