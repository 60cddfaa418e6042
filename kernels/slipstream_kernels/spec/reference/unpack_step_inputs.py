"""unpack_step_inputs in plain torch.  It reads the sizes on the host, so it cannot be captured."""

from __future__ import annotations

import torch

from slipstream_kernels.spec.unpack_step_inputs import ArrivedInputs


def unpack_step_inputs(
    arrived: ArrivedInputs, block_tables: torch.Tensor, token_ids: torch.Tensor, drawn: torch.Tensor
) -> None:
    """See ops.unpack_step_inputs."""
    num_groups, (num_rows, width) = len(block_tables), arrived.size.tolist()
    tables = arrived.tables[: num_groups * num_rows * width]
    block_tables[:, :num_rows, :width] = tables.view(num_groups, num_rows, width)
    is_pending = arrived.sources >= 0
    token_ids[is_pending] = drawn[arrived.sources[is_pending]]
    arrived.sources.fill_(-1)
