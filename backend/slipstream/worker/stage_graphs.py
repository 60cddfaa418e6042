"""The steps of a stage as CUDA graphs. Engine thread.

Several steps may be underway, whose tensors are read again when they are finished. So there are several sets of
graphs, each with tensors of its own, and steps take them in turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.nn.batch import ForwardBatch
from slipstream.worker.cuda_graphs import StepGraphs
from slipstream.worker.graph_shapes import GraphShape
from slipstream.worker.input_batch import StepArrays


class StageGraphs:
    """As StepGraphs, but a loaded batch is valid until as many more are loaded as there are sets. All are alike."""

    def __init__(self, sets: Sequence[StepGraphs[GraphShape]]) -> None:
        self._sets = sets
        self._current = 0

    @property
    def shapes(self) -> Sequence[GraphShape]:
        return self._sets[0].shapes

    def captured_for(self, step: StepArrays) -> GraphShape | None:
        return self._sets[0].captured_for(step)

    def warm_up(self) -> None:
        self._sets[0].warm_up()

    def capture(self) -> None:
        first, *others = self._sets
        first.capture()
        for graphs in others:
            graphs.capture(beside=first)

    def load(self, shape: GraphShape, step: StepArrays) -> ForwardBatch:
        self._current = (self._current + 1) % len(self._sets)
        return self._sets[self._current].load(shape, step)

    def replay(self, shape: GraphShape) -> torch.Tensor:
        """Compute the last loaded step. The tensor is its own: it is sent while the next step is computed."""
        return self._sets[self._current].replay(shape).clone()
