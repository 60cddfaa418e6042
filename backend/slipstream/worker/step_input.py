"""A step's tensors as the runner hands them around. Engine thread."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.nn.batch import ForwardBatch
from slipstream.worker.cuda_graphs import GraphShape
from slipstream.worker.prompt_shapes import PromptShape


@dataclass(frozen=True)
class StepInput:
    """graph: the shape of the CUDA graph whose tensors they are, padded to it; None: run eagerly.

    is_last_only: hidden states are computed of the rows that sample alone, by the graph of prompt_graph if any.
    """

    batch: ForwardBatch
    graph: GraphShape | None = None
    prompt_graph: PromptShape | None = None
    is_last_only: bool = False
