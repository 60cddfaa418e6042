"""What a step has computed and drawn, on the device alone: from the runner to heads that draft from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slipstream_kernels import ops

from slipstream.nn.batch import ForwardBatch
from slipstream.worker.cuda_graphs import GraphShape


@dataclass(frozen=True)
class ComputedRows:
    """hidden: [T, width of Decoder.forward]. next_ids: [T] int64, the token after each row: drawn or the prompt's next.
    last: [R] int64, of each request the last row that holds. kept: None if no request of the step had drafts.
    graph: whose static tensors all of these are; None: they are this step's own.

    Of a step with prompts hidden, next_ids and last are of the rows that sample alone, where no head reads all rows.
    """

    batch: ForwardBatch
    hidden: torch.Tensor
    next_ids: torch.Tensor
    last: torch.Tensor
    kept: ops.AcceptedRows | None
    graph: GraphShape | None = None
