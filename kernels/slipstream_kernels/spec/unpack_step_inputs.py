"""unpack_step_inputs: contract and choice.  The first kernel of a CUDA graph: completes what one copy brought."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream_kernels.select import require_shape, select


class ArrivedInputs(NamedTuple):
    """What a copy from the host brings beside a step's own tensors.

    size: [2] int32, the rows and the width of the block tables; (0, 0): none have arrived.  tables: contiguous int32,
    at least num_groups * rows * width, the tables of all KV groups without gaps.  sources: contiguous [T] int64, where
    in `drawn` the token id lies that the host does not know; -1: it is given.
    """

    size: torch.Tensor
    tables: torch.Tensor
    sources: torch.Tensor


def unpack_step_inputs(
    arrived: ArrivedInputs,
    block_tables: torch.Tensor,
    token_ids: torch.Tensor,
    drawn: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Write the arrived block tables into wider ones, and drawn tokens into their places, in place.

    block_tables: [num_groups, R, max_blocks] int32, rows contiguous; changed are [:, :rows, :width].  token_ids:
    contiguous [T] int64; where sources[t] >= 0, token_ids[t] becomes drawn[sources[t]].  drawn: contiguous [N] int64.

    Each source becomes -1 once it is used: a graph may run again over inputs that update_step_inputs has changed, and
    then keeps their tokens.  The launch depends on shapes only.  The caller ensures rows <= R, width <= max_blocks and
    sources < N; not checked, because a check on the device would synchronise.
    """
    require_shape("size", arrived.size, (2,))
    require_shape("sources", arrived.sources, tuple(token_ids.shape))
    for name, tensor, dtype, num_dims in (
        ("size", arrived.size, torch.int32, 1),
        ("tables", arrived.tables, torch.int32, 1),
        ("sources", arrived.sources, torch.int64, 1),
        ("token_ids", token_ids, torch.int64, 1),
        ("drawn", drawn, torch.int64, 1),
        ("block_tables", block_tables, torch.int32, 3),
    ):
        if tensor.dtype != dtype or tensor.dim() != num_dims or tensor.stride(-1) != 1:
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} of {num_dims} dimensions")
    implementation = select("spec.unpack_step_inputs", backend, token_ids)
    implementation.unpack_step_inputs(arrived, block_tables, token_ids, drawn)
