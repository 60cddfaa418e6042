"""Adapters on the device: which row of a step has which, and their weights in slots. Engine thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

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

    CUDA graphs of such steps are captured beside those without: rows' slots lie in one static tensor.
    """

    def __init__(self, model: Decoder, kv_caches: Sequence[LayerCache], max_num_tokens: int) -> None:
        assert model.context.lora is not None
        self._model, self._kv_caches, self._rows = model, kv_caches, model.context.lora
        self._targets = lora_targets(model)
        self._slots = torch.full((max_num_tokens,), NO_SLOT, dtype=torch.int64, device=model.context.device)
        self.graphs: StepGraphs[GraphShape] | None = None

    def load(self, adapters: Sequence[tuple[int, Adapter]]) -> None:
        for slot, adapter in adapters:
            self._targets.load(slot, adapter.pairs)

    def tensors(self, step: StepInput, states: Sequence[RequestState], arrays: StepArrays) -> StepTensors | None:
        """The tensors of a step with adapters, whose rows have their slots then; None for one without."""
        slots = np.array([state.adapter_slot for state in states], dtype=np.int64)
        if slots.max(initial=NO_SLOT) == NO_SLOT:
            return None
        of_rows = np.repeat(slots, step.num_scheduled_tokens)
        self._slots[: len(of_rows)].copy_(pack([of_rows], self._slots.device)[0])
        shape = None if self.graphs is None or step.total_num_drafts else self.graphs.shape_for(arrays)
        if shape is None or self.graphs is None:
            batch = batch_tensors(arrays, self._slots.device)
            return StepTensors(batch, has_adapters=True)
        self._slots[len(of_rows) : shape.num_tokens] = NO_SLOT
        return StepTensors(self.graphs.load(shape, arrays), adapter_graph=shape, has_adapters=True)

    def forward(self, tensors: StepTensors) -> torch.Tensor:
        if tensors.adapter_graph is not None:
            assert self.graphs is not None
            return self.graphs.replay(tensors.adapter_graph)
        return self.run(tensors.batch)

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        self._rows.begin(self._slots[: len(batch.token_ids)])
        try:
            return self._model.forward(batch, self._kv_caches)
        finally:
            self._rows.end()
