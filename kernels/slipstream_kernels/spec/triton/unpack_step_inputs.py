"""unpack_step_inputs in Triton-lang: a program for each row of the block tables, and one for each block of tokens.

Later kernels of a step read block tables before they wait for the kernel in front of them
(slipstream_kernels/dependent_launch.py).  So this kernel never starts dependents, and is launched in the ordinary way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.spec.unpack_step_inputs import ArrivedInputs
from slipstream_kernels.triton.step_kernel import step_kernel

BLOCK = 1024


def unpack_step_inputs(
    arrived: ArrivedInputs, block_tables: torch.Tensor, token_ids: torch.Tensor, drawn: torch.Tensor
) -> None:
    """See ops.unpack_step_inputs.  All numbers change from graph to graph, so it is compiled once."""
    num_groups, num_requests, _ = block_tables.shape
    num_tokens, num_rows = len(token_ids), num_groups * num_requests
    _unpack_kernel[(num_rows + triton.cdiv(num_tokens, BLOCK),)](
        arrived.size,
        arrived.tables,
        arrived.sources,
        block_tables,
        token_ids,
        drawn,
        block_tables.stride(0),
        block_tables.stride(1),
        num_requests,
        num_rows,
        num_tokens,
        BLOCK=BLOCK,
        num_warps=4,
    )


@step_kernel
def _unpack_kernel(size_ptr, arrived_ptr, pending_ptr, tables_ptr, token_ids_ptr, drawn_ptr, group_stride, table_stride,
                   num_requests, num_rows, num_tokens, BLOCK: tl.constexpr):  # fmt: skip
    """Grid (num_rows of all groups + blocks of tokens)."""
    program = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    if program < num_rows:
        group, row = program // num_requests, program % num_requests
        num_arrived, width = tl.load(size_ptr), tl.load(size_ptr + 1)
        if row < num_arrived:
            source = arrived_ptr + (group * num_arrived + row) * width
            target = tables_ptr + group * group_stride + row * table_stride
            for first in range(0, width, BLOCK):
                columns = first + offsets
                blocks = tl.load(source + columns, mask=columns < width)
                tl.store(target + columns, blocks, mask=columns < width)
    else:
        tokens = (program - num_rows) * BLOCK + offsets
        places = tl.load(pending_ptr + tokens, mask=tokens < num_tokens, other=-1)
        is_pending = places >= 0
        token_ids = tl.load(drawn_ptr + places, mask=is_pending)
        tl.store(token_ids_ptr + tokens, token_ids, mask=is_pending)
        tl.store(pending_ptr + tokens, tl.full([BLOCK], -1, tl.int64), mask=is_pending)
