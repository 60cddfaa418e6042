"""Chunks of prompts that take several steps, some of the layers in each (core/layered_prefill.py). Engine thread.

Between two steps the rows of one chunk wait on the device: what the layers so far have left of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream.nn.batch import ForwardBatch
from slipstream.nn.decoder import Decoder
from slipstream.nn.kv_layout import LayerCache
from slipstream.worker.cuda_graphs import StepGraphs
from slipstream.worker.graph_shapes import LayerShape
from slipstream.worker.input_batch import BatchBuilder, StepArrays
from slipstream.worker.interface import LayeredInput, StepInput
from slipstream.worker.static_tensors import GraphInputs


class LayerGraphs(StepGraphs[LayerShape]):
    """A graph for each layer of a chunk: its kernels, launched one by one, take the host as long as the device, and a
    host that is slow for a moment would hold up the decodes behind them. All read and write the same rows."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        model: Decoder,
        kv_caches: Sequence[LayerCache],
        inputs: GraphInputs,
    ) -> None:
        """shapes: of all layers, or none."""
        whole = partial(model.forward_last, kv_caches=kv_caches)
        super().__init__(shapes, inputs, whole)
        self._model, self._kv_caches = model, kv_caches
        size = 2, shapes[0].num_tokens if shapes else 0, model.spec.hidden_size  # layers hand on two tensors
        self._rows = torch.zeros(size, dtype=model.context.dtype, device=model.context.device)

    def warm_up(self) -> None:
        """All layers at once have the same kernels."""
        if self._shapes:
            self._forward(self._batch(self._shapes[0], 0))

    def _compute(self, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
        batch, layers = self._batch(shape, 0), range(shape.layer, shape.layer + 1)
        hidden, residual = self._rows
        # a copy, as a norm is launched early (PDL), and may want a kernel before it in its graph
        before = (hidden.clone(), residual) if shape.layer else None
        found = self._model.forward_layers(batch, self._kv_caches, layers, before)
        if layers.stop < len(self._shapes):  # the last has no rows
            hidden.copy_(found[0])
            residual.copy_(found[1])
        return hidden[:0], None  # the rows stay valid whatever is replayed next

    def run_eagerly(
        self, batch: ForwardBatch, layers: range, rows: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor] | None:
        """Run a chunk that fits no graph. rows: behind the layers before; returns those behind these. None: no rows."""
        rows = self._model.forward_layers(batch, self._kv_caches, layers, rows if layers.start else None)
        return None if layers.stop == len(self._model.layers) else rows

    def run(self, arrays: StepArrays, layers: range) -> None:
        """Send a chunk that fits through some layers, behind those of the runs before."""
        shapes = self._shapes[layers.start : layers.stop]
        self.load(shapes[0], arrays)
        for shape in shapes:
            self.replay(shape)


class LayeredRows:
    """The rows of the chunk that is underway. graphs: for chunks that fit them, captured later."""

    def __init__(self, graphs: LayerGraphs, builder: BatchBuilder) -> None:
        self.graphs, self._builder = graphs, builder
        self._rows: tuple[Tensor, Tensor] | None = None

    def run(self, chunk: LayeredInput) -> None:
        """Launch it. The caller has told the builder of the request's blocks."""
        step = StepInput(
            step_id=0,
            sequence_ids=[chunk.sequence_id],
            num_computed_tokens=[chunk.first_token],
            num_scheduled_tokens=[len(chunk.token_ids)],
            num_drafts=[0],
            samples=[False],
            token_ids=chunk.token_ids,
        )
        arrays, layers = self._builder.arrays(step), range(chunk.first_layer, chunk.end_layer)
        if self.graphs.shape_for(arrays) is not None:
            self.graphs.run(arrays, layers)
            return
        self._rows = self.graphs.run_eagerly(self._builder.tensors(arrays), layers, self._rows)
