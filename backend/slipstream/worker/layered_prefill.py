"""Chunks of prompts that take several steps, some of the layers in each (core/layered_prefill.py). Engine thread.

Between two steps the rows of one chunk wait on the device: what the layers so far have left of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slipstream.nn.decoder import Decoder
from slipstream.nn.kv_layout import LayerCache
from slipstream.worker.input_batch import BatchBuilder
from slipstream.worker.interface import LayeredInput, StepInput


class LayeredRows:
    """The rows of the chunk that is underway."""

    def __init__(self, model: Decoder, kv_caches: Sequence[LayerCache], builder: BatchBuilder) -> None:
        self._model, self._kv_caches, self._builder = model, kv_caches, builder
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
        batch = self._builder.tensors(self._builder.arrays(step))
        layers = range(chunk.first_layer, chunk.end_layer)
        rows = self._model.forward_layers(batch, self._kv_caches, layers, self._rows if layers.start else None)
        self._rows = None if layers.stop == len(self._model.layers) else rows
