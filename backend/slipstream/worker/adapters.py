"""Adapters on the device: which row of a step has which, and their weights in slots. Engine thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from slipstream_kernels import ops

from slipstream.core.adapters import NO_SLOT, Adapter
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.decoder import Decoder
from slipstream.nn.kv_layout import LayerCache
from slipstream.nn.load import lora_targets
from slipstream.worker.cuda_graphs import StepGraphs
from slipstream.worker.graph_shapes import GraphShape
from slipstream.worker.host_copy import pack
from slipstream.worker.input_batch import StepArrays, batch_tensors
from slipstream.worker.interface import StepInput
from slipstream.worker.launched_step import StepTensors
from slipstream.worker.request_state import RequestState


class AdapterRows:
    """Runs the steps in which some request has an adapter. max_num_tokens: of a step.

    CUDA graphs of such steps are captured beside those without: rows' tiles lie in one static tensor.
    """

    def __init__(self, model: Decoder, kv_caches: Sequence[LayerCache], max_num_tokens: int) -> None:
        assert model.context.lora is not None
        self._model, self._kv_caches, self._rows = model, kv_caches, model.context.lora
        self._targets = lora_targets(model)
        most = max(
            _num_words(count, self._rows.num_slots)
            for count in (min(max_num_tokens, ops.MAX_FEW_TOKENS), max_num_tokens)
        )
        self._tiles = torch.full((most,), NO_SLOT, dtype=torch.int32, device=model.context.device)
        self.graphs: StepGraphs[GraphShape] | None = None

    def load(self, adapters: Sequence[tuple[int, Adapter]]) -> None:
        for slot, adapter in adapters:
            self._targets.load(slot, adapter.pairs)

    def tensors(self, step: StepInput, states: Sequence[RequestState], arrays: StepArrays) -> StepTensors | None:
        """The tensors of a step with adapters, whose rows are in their tiles then; None for one without."""
        slots = np.array([state.adapter_slot for state in states], dtype=np.int32)
        if slots.max(initial=NO_SLOT) == NO_SLOT:
            return None
        shape = None if self.graphs is None or step.total_num_drafts else self.graphs.captured_for(arrays)
        of_rows = np.repeat(slots, step.num_scheduled_tokens)
        num_tokens = len(of_rows) if shape is None else shape.num_tokens
        tiles = np.concatenate([array.ravel() for array in gather_rows(of_rows, num_tokens, self._rows.num_slots)])
        self._tiles[: len(tiles)].copy_(pack([tiles], self._tiles.device)[0])
        if shape is None or self.graphs is None:
            return StepTensors(batch_tensors(arrays, self._tiles.device), has_adapters=True)
        return StepTensors(self.graphs.load(shape, arrays), adapter_graph=shape, has_adapters=True)

    def forward(self, tensors: StepTensors) -> torch.Tensor:
        if tensors.adapter_graph is not None:
            assert self.graphs is not None
            return self.graphs.replay(tensors.adapter_graph)
        return self.run(tensors.batch)

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        with self.applied(len(batch.token_ids)):
            return self._model.forward(batch, self._kv_caches)

    @contextmanager
    def applied(self, num_tokens: int) -> Iterator[None]:
        """The model adds the adapters of the last step of `tensors`, which has this number of rows."""
        count, rows = ops.count_tiles(num_tokens, self._rows.num_slots), ops.tile_rows(num_tokens)
        self._rows.tiles = ops.AdapterTiles(
            self._tiles[:count], self._tiles[count : count * (1 + rows)].view(count, rows)
        )
        try:
            yield
        finally:
            self._rows.tiles = None


def _num_words(num_tokens: int, num_slots: int) -> int:
    """Words of the tiles of a step."""
    return ops.count_tiles(num_tokens, num_slots) * (1 + ops.tile_rows(num_tokens))


def gather_rows(slots: np.ndarray, num_tokens: int, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Arrays of ops.AdapterTiles, for the rows that have these slots and others up to num_tokens, which have none."""
    count, size = ops.count_tiles(num_tokens, num_slots), ops.tile_rows(num_tokens)
    of_tiles = np.full(count, ops.NO_SLOT, dtype=np.int32)
    rows = np.full((count, size), ops.NO_ROW, dtype=np.int32)
    order = np.argsort(slots, kind="stable")
    order = order[np.searchsorted(slots, 0, sorter=order) :]  # rows without an adapter come first
    own = slots[order]
    starts = np.searchsorted(own, np.arange(num_slots + 1))  # of each slot, in `own`
    first_tile = np.concatenate([[0], np.cumsum(-(-np.diff(starts) // size))])
    in_slot = np.arange(len(own)) - starts[own]
    tiles = first_tile[own] + in_slot // size
    of_tiles[tiles] = own
    rows[tiles, in_slot % size] = order
    return of_tiles, rows
