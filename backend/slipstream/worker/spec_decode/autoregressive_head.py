"""Draft heads with a KV cache of their own, one token behind the model's: EAGLE and MTP. Engine thread.

Slot i of the cache holds the head's keys and values for token i + 1 and the model's hidden state at i. The head
computes all rows of a step: the next step overwrites the slots of rejected drafts, and the slots of accepted branches
are compacted as the model's are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from slipstream_kernels import ops

from slipstream.nn.batch import ForwardBatch
from slipstream.nn.kv_layout import LayerCache
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.interface import DraftBudget, DraftTokens
from slipstream.worker.kv_cache import Compaction, allocate_pool
from slipstream.worker.launched_step import ComputedRows
from slipstream.worker.load_target import in_inference_mode
from slipstream.worker.request_state import RequestState
from slipstream.worker.spec_decode.draft_batch import RowsAfter
from slipstream.worker.spec_decode.draft_graphs import GraphedHead
from slipstream.worker.spec_decode.draft_kv_state import DraftKVState
from slipstream.worker.spec_decode.interface import DraftReadiness, SpeculatorContext


class AutoregressiveHead(GraphedHead):
    """spec: of the head's one layer."""

    reads_all_rows = True
    drafts_trees = False
    num_drafts: int
    num_levels: int
    num_scratch_slots: int

    def __init__(self, context: SpeculatorContext, spec: DecoderSpec) -> None:
        super().__init__()
        plan, device = context.plan, context.hardware.device
        self._num_tokens = spec.vocab_size
        pool = allocate_pool(spec, context.hardware, plan)
        self._cache: LayerCache = pool.layers[0]
        self._compaction = Compaction(pool, device)
        self._kv_state = DraftKVState(plan.num_blocks, plan.block_size)
        self._after = RowsAfter(plan.block_size, plan.max_model_len)

    @abstractmethod
    def drafts(self, wanted: DraftBudget, tokens: list[Any]) -> DraftTokens:
        """See DraftHead."""

    @abstractmethod
    def rows_of(self, tokens: torch.Tensor, num_drafts: int) -> ops.DraftRows:
        """See DraftHead."""

    @abstractmethod
    def _first_pass(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        """batch: token i + 1 in the slot of token i. hidden: the model's, at i. Returns the head's own states."""

    @abstractmethod
    def _levels(self, batch: ForwardBatch, last: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Draft tokens after the rows `last` of batch, one a request, whose states are the head's, [R, size]."""

    @in_inference_mode
    def update_kv(self, rows: ComputedRows) -> None:
        self._pass(rows)

    def after_step(self, request: RequestState, start: int, count: int, is_updated: bool) -> DraftReadiness:
        if not is_updated:
            self._kv_state.lose(request, start, count)
            return DraftReadiness.BEHIND
        is_whole = self._kv_state.record(request, start, count)
        return DraftReadiness.READY if is_whole else DraftReadiness.LOST  # the head cannot fill the gap

    def forget(self, sequence_ids: Sequence[int]) -> None:
        self._kv_state.forget(sequence_ids)

    def _draft(self, rows: ComputedRows) -> torch.Tensor:
        return self._levels(rows.batch, rows.last, self._pass(rows)[rows.last])

    def _pass(self, rows: ComputedRows) -> torch.Tensor:
        # padding rows may hold any number, also one that is no token id
        batch = replace(rows.batch, token_ids=rows.next_ids.clamp(0, self._num_tokens - 1))
        states = self._first_pass(batch, rows.hidden)
        if rows.accepted is not None and rows.batch.tree_mask is not None:
            self._compaction.keep(rows.accepted)
        return states
