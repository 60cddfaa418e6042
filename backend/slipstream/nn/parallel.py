"""Parallel: rank and number of ranks of a sharded model. Passed to everything that is sharded, never looked up.

Only size 1 runs: for more ranks, weights can be sharded and loaded, but no code computes with them yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.core.errors import ConfigError


@dataclass(frozen=True)
class Parallel:
    rank: int = 0
    size: int = 1

    def range_of(self, name: str, total: int, unit: int) -> slice:
        """This rank's range of `total` features, in multiples of `unit`; with fewer units than ranks, ranks share one.

        Raises ConfigError unless the number of units divides the number of ranks or the reverse.
        """
        units = total // unit
        if units % self.size == 0:
            first, count = self.rank * (units // self.size), units // self.size
        elif self.size % units == 0:
            first, count = self.rank * units // self.size, 1
        else:
            reason = f"{name} has {units} parts of {unit} features, which {self.size} ranks do not share evenly"
            raise ConfigError("tensor parallel size", self.size, reason)
        return slice(first * unit, (first + count) * unit)

    def vocabulary(self, size: int) -> slice:
        """This rank's rows of an embedding or a head; the last ranks may have fewer."""
        rows = -(-size // self.size)
        return slice(min(size, self.rank * rows), min(size, (self.rank + 1) * rows))


SINGLE = Parallel()
