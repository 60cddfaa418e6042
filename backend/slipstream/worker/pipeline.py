"""A stage of a model: its part of each step, between the stages before and behind it.

Engine thread. The first stage has the embedding, the final norm and the head; the residual stream goes from stage to
stage, and the last one sends it back to the first, which samples. A step is launched and finished apart, so that others
may be in the stages meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slipstream.nn.batch import ForwardBatch
from slipstream.nn.decoder import Decoder
from slipstream.nn.kv_layout import LayerCache
from slipstream.nn.parallel import Parallel, Pipe
from slipstream.worker.cuda_graphs import StepGraphs
from slipstream.worker.graph_memory import num_graph_sets
from slipstream.worker.graph_shapes import GraphShape
from slipstream.worker.stage_graphs import StageGraphs

MakeGraphs = Callable[[Callable[[ForwardBatch], torch.Tensor]], StepGraphs[GraphShape]]


class PipelineStage:
    """kv_caches: of the stage's layers. make_graphs: graphs of what is given; graphs: of the stage's part of a step."""

    def __init__(
        self, model: Decoder, kv_caches: Sequence[LayerCache], parallel: Parallel, make_graphs: MakeGraphs
    ) -> None:
        assert parallel.pipe is not None, "a stage without the others holds weights, and does not compute"
        self._model, self._kv_caches = model, kv_caches
        self._pipe: Pipe = parallel.pipe
        self.is_first, self._is_last = parallel.stage == 0, parallel.stage == parallel.num_stages - 1
        self.graphs = StageGraphs([make_graphs(self._compute_padded) for _ in range(num_graph_sets(parallel))])
        most = max((shape.num_tokens for shape in self.graphs.shapes), default=0)
        self._arrived = self._rows(0 if self.is_first else most).zero_()  # what graphs read

    def launch(self, batch: ForwardBatch, is_last_only: bool, graph: GraphShape | None = None) -> None:
        """Receive, unless it is the first stage, compute and send on. is_last_only: the last layer computes only rows
        of batch.logits_indices. graph: that the batch is padded for."""
        num_rows, received = len(batch.token_ids), None
        if not self.is_first:
            num_features = self._model.num_features_before(self._model.own_indices.start)
            place = self._rows(num_rows * (1 + num_features)) if graph is None else self._arrived[:num_rows]
            received = self._pipe.receive(place)
        hidden = self._compute(batch, received, is_last_only) if graph is None else self.graphs.replay(graph)
        if len(hidden):  # no row is wanted of the middle of a prompt
            self._pipe.send(hidden)

    def _compute(self, batch: ForwardBatch, received: torch.Tensor | None, is_last_only: bool) -> torch.Tensor:
        hidden = self._model.embedding(batch.token_ids, batch.given) if received is None else received
        return self._model.forward_stage(hidden, batch, self._kv_caches, is_last_only and self._is_last)

    def _compute_padded(self, batch: ForwardBatch) -> torch.Tensor:
        # a copy, as a norm is launched early (PDL), and may want a kernel before it in its graph
        received = None if self.is_first else self._arrived[: len(batch.token_ids)].clone()
        return self._compute(batch, received, is_last_only=False)

    def finish(self, batch: ForwardBatch, is_last_only: bool) -> torch.Tensor:
        """On the first stage: the final hidden states of the oldest step that is not finished, as Decoder.forward's or
        forward_last's."""
        num_rows, model = len(batch.logits_indices) if is_last_only else len(batch.token_ids), self._model
        rows = self._rows(num_rows * (1 + model.num_features_before(model.spec.num_layers)))
        return model.rows_of_stream(self._pipe.receive(rows), num_rows) if num_rows else rows

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Launch and finish; None on the other stages."""
        self.launch(batch, is_last_only=False)
        return self.finish(batch, is_last_only=False) if self.is_first else None

    def no_rows(self) -> torch.Tensor:
        return self._rows(0)

    def _rows(self, num_rows: int) -> torch.Tensor:
        context = self._model.context
        return torch.empty(num_rows, self._model.spec.hidden_size, dtype=context.dtype, device=context.device)
