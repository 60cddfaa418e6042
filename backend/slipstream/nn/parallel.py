"""Parallel: rank and number of ranks of a sharded model, its stages, and what ranks say to each other.

Passed to everything that is sharded, never looked up. A layer's collective calls all go through the methods here; all
ranks make the same ones in the same order. Without `collectives` a rank holds weights and cannot compute.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from slipstream.core.errors import ConfigError, EngineError
from slipstream.core.load_progress import LoadProgress

T = TypeVar("T")
# Features along which kernels step, and of most groups of 4-bit weights and blocks of scales.
BLOCK = 128
# Rows of a vocabulary's matrices are padded to a multiple: the library's products of other numbers take up to 5.8 times
# as long (docs/measurements/gemm.md).
VOCABULARY_UNIT = 16
# The features of the rank with most of them, over those of the average: all wait for it.
MOST_UNEVEN = 1.05


class Collectives(Protocol):
    """Calls that every rank makes with tensors of one shape and dtype."""

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over the ranks, the same bits on every rank; may be the changed argument."""
        ...

    def gather(self, own: Tensor) -> Tensor:
        """[num_ranks, *own.shape] in the order of ranks."""
        ...

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The first rank's; may be the changed argument."""
        ...

    def decide(self, value: T) -> T:
        """The first rank's value, of any picklable type. Waits for all ranks; not for use in a step."""
        ...

    def any_of(self, value: bool) -> bool:
        """Whether some rank says so. Waits for all ranks; not for use in a step."""
        ...


class Pipe(Protocol):
    """The way of rows from a stage to the next one, and from the last to the first, between ranks of one place in their
    stages. What one sends, the other receives in the same order."""

    def send(self, rows: Tensor) -> None:
        """Does not wait for the receiver, unless that is several steps behind. rows: contiguous, not changed after."""
        ...

    def receive(self, rows: Tensor) -> Tensor:
        """Fills and returns `rows`, whose shape and dtype are the sender's."""
        ...

    def drain(self) -> None:
        """Let go of what was sent, after all of it has been received."""
        ...


@dataclass(frozen=True)
class Parallel:
    """rank, size: of those that share every layer of a stage. layers: numbers of layers of the stages, empty for one
    stage of all. splits_experts: a rank has some experts whole, instead of a part of every expert. num_nodes: machines
    that have the same number of ranks each, the first ranks on the first. progress: of this rank's load, which others
    wait for."""

    rank: int = 0
    size: int = 1
    collectives: Collectives | None = field(default=None, compare=False)
    splits_experts: bool = False
    num_nodes: int = 1
    stage: int = 0
    layers: tuple[int, ...] = ()
    pipe: Pipe | None = field(default=None, compare=False)
    progress: LoadProgress | None = field(default=None, compare=False)

    @property
    def num_stages(self) -> int:
        return max(1, len(self.layers))

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return self.size * self.num_stages

    @property
    def number(self) -> int:
        """Among the ranks of all stages: those of a stage follow each other."""
        return self.stage * self.size + self.rank

    @property
    def num_local(self) -> int:
        """Ranks of a machine."""
        return self.num_ranks // self.num_nodes

    @property
    def node(self) -> int:
        """The machine of this rank."""
        return self.number // self.num_local

    def note(self, done: str) -> None:
        """What this rank has done of its load just now: one that does nothing for long is taken for stuck."""
        if self.progress is not None:
            self.progress.note(done)

    def of_number(self, number: int) -> Parallel:
        """Another rank's."""
        return replace(self, stage=number // self.size, rank=number % self.size)

    def own_layers(self, num_layers: int) -> range:
        """Those of this rank's stage."""
        if not self.layers:
            return range(num_layers)
        first = sum(self.layers[: self.stage])
        return range(first, first + self.layers[self.stage])

    @property
    def _others(self) -> Collectives:
        if self.collectives is None:
            raise EngineError("a rank of several without the others holds weights, and does not compute")
        return self.collectives

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of what each rank has of a result; may change its argument."""
        return partial if self.size == 1 else self._others.sum(partial)

    def gather_vocabulary(self, own: Tensor, size: int) -> Tensor:
        """own: [S, vocabulary_width(size)] -> [S, size], the same on every rank, without what pads the weights."""
        whole = own if self.size == 1 else self._others.gather(own.contiguous()).transpose(0, 1).flatten(1)
        if whole.shape[1] == size:
            return whole
        return whole[:, :size].clone(memory_format=torch.contiguous_format)  # also of one row: kernels see its stride

    def agree(self, tensor: Tensor) -> Tensor:
        """The first rank's, on every rank; may change its argument."""
        return tensor if self.size == 1 else self._others.broadcast(tensor)

    def decide(self, value: T) -> T:
        """The first rank's value: for all that ranks would else measure or choose by themselves."""
        return value if self.num_ranks == 1 else self._others.decide(value)

    def any_of(self, value: bool) -> bool:
        """Whether some rank says so, of what each has measured."""
        return value if self.num_ranks == 1 else self._others.any_of(value)

    def range_of(self, name: str, total: int, unit: int) -> slice:
        """This rank's range of `total` features, in multiples of `unit`. Raises ConfigError unless the number of ranks
        divides the number of units: what two ranks had would be summed twice."""
        units = total // unit
        if units % self.size:
            raise self._uneven(name, units, unit, f"a divisor of {units}")
        count = units // self.size
        return slice(self.rank * count * unit, (self.rank + 1) * count * unit)

    def repeated_range_of(self, name: str, total: int, unit: int) -> slice:
        """As `range_of`; of fewer units than ranks, several ranks have the same one."""
        units = total // unit
        if units % self.size == 0:
            return self.range_of(name, total, unit)
        if self.size % units:
            raise self._uneven(name, units, unit, f"a divisor or a multiple of {units}")
        first = self.rank * units // self.size
        return slice(first * unit, (first + 1) * unit)

    def _uneven(self, name: str, units: int, unit: int, accepted: str) -> ConfigError:
        reason = f"{name} has {units} parts of {unit} features, which {self.size} ranks do not share evenly"
        return ConfigError(FIELD, self.size, f"{reason}, only {accepted} does")

    def blocks_of(self, name: str, total: int) -> slice:
        """This rank's range of `total` features: in whole blocks where that is nearly even, the most on the first rank;
        else in single features, as `range_of`."""
        blocks = total // BLOCK
        if total % BLOCK or -(-blocks // self.size) * self.size > MOST_UNEVEN * blocks:
            return self.range_of(name, total, 1)
        first, end = (-(-blocks * rank // self.size) for rank in (self.rank, self.rank + 1))
        return slice(first * BLOCK, end * BLOCK)

    def experts(self, num_experts: int) -> slice:
        """The experts that this rank has. Raises ConfigError unless all ranks have the same number."""
        if not self.splits_experts:
            return slice(0, num_experts)
        if num_experts % self.size:
            reason = f"{num_experts} experts, which {self.size} ranks do not share evenly"
            raise ConfigError("expert_parallel", True, reason)
        count = num_experts // self.size
        return slice(self.rank * count, (self.rank + 1) * count)

    def vocabulary(self, size: int) -> slice:
        """This rank's rows of an embedding or a head; the last ranks may have fewer."""
        rows = self.vocabulary_width(size)
        return slice(min(size, self.rank * rows), min(size, (self.rank + 1) * rows))

    def vocabulary_width(self, size: int) -> int:
        """Rows of the weight that holds them: as many on every rank, zeros behind the rank's own."""
        return -(-size // (self.size * VOCABULARY_UNIT)) * VOCABULARY_UNIT


FIELD = "tensor_parallel_size"
SINGLE = Parallel()
