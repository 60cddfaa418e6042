"""local_routing, local_rows: the part of a routing whose experts one of several ranks has.  Plain torch on any device.

Nothing is read on the host: safe in CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream_kernels.routing import Routing


@dataclass(frozen=True)
class LocalRouting(Routing):
    """num_all_experts: of all ranks. Any number of the rows may be of this rank's experts."""

    num_all_experts: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """As Routing.sizes, by which kernels are chosen, with the rows that this rank's experts have on average."""
        num_own_rows = -(-self.num_rows * self.num_experts // self.num_all_experts)
        return self.num_tokens, num_own_rows, self.num_experts


def local_routing(routing: Routing, experts: slice) -> LocalRouting:
    """The same rows, those of `experts` first: expert e of the result is experts.start + e.

    Pairs of a token and an expert of another rank get weight 0, and rows behind those of the last expert, which
    products leave undefined.
    """
    first, last = routing.offsets[experts.start], routing.offsets[experts.stop]
    num_rows = routing.num_rows
    order = (torch.arange(num_rows, dtype=torch.int32, device=first.device) + first) % max(num_rows, 1)
    rows = (routing.rows - first) % max(num_rows, 1)
    weights = torch.where(rows < last - first, routing.weights, 0.0)
    offsets = routing.offsets[experts.start : experts.stop + 1] - first
    return LocalRouting(weights, rows, routing.tokens[order.long()], offsets, routing.num_experts)


def local_rows(y: Tensor, routing: Routing) -> Tensor:
    """y: [num_rows, …] of a product over a local routing, with zeros where it is undefined."""
    numbers = torch.arange(routing.num_rows, dtype=torch.int32, device=y.device)
    return torch.where((numbers < routing.offsets[-1])[:, None], y, 0)
