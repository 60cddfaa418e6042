"""The part of a runner that verifies drafts, and tells heads what holds: all on the device. Engine thread."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from slipstream_kernels import ops

from slipstream.core.config import SpeculationConfig
from slipstream.core.step import ScheduledRequest, ScheduledStep
from slipstream.nn.decoder import Decoder
from slipstream.worker.compaction import Compaction
from slipstream.worker.computed_rows import ComputedRows
from slipstream.worker.cuda_graphs import GraphShape, StepGraphs
from slipstream.worker.host_copy import HostCopy, to_device
from slipstream.worker.input_batch import SampledTokens
from slipstream.worker.memory_plan import MemoryPlan
from slipstream.worker.sample.logprobs import PromptLogprobs
from slipstream.worker.sample.sampler import Sampler, is_plain
from slipstream.worker.spec_decode.verify import Verification
from slipstream.worker.step_input import StepInput
from slipstream.worker.step_sample import LaunchedVerification


class Verifier:
    """num_tokens, num_requests: room for the largest graph and step. What it returns is good until its next call."""

    def __init__(
        self,
        model: Decoder,
        sampler: Sampler,
        compaction: Compaction,
        config: SpeculationConfig,
        plan: MemoryPlan,
        room: tuple[int, int],
    ) -> None:
        num_tokens, num_requests = room
        self._model, self._sampler, self._compaction, self._config = model, sampler, compaction, config
        self._plan, self._device = plan, model.context.device
        self._next_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        self._kept = ops.empty_accepted_rows(num_requests, self._device)

    def rows_of_graphs(self, graphs: StepGraphs[GraphShape]) -> list[ComputedRows]:
        """The static tensors of every graph of a verification, for drafting to be captured behind it."""
        found = []
        for shape in graphs.shapes:
            if shape.is_verification:
                batch, hidden = graphs.tensors(shape)
                kept, next_ids = self._kept.first(shape.num_requests), self._next_ids[: shape.num_tokens]
                found.append(ComputedRows(batch, hidden, next_ids, kept.last, kept, shape))
        return found

    def warm_up(self, rows: Sequence[ComputedRows]) -> None:
        """Compile what verifications run, with trees and without, on tensors like theirs; nothing is kept."""
        for one in {row.batch.tree_mask is None: row for row in rows}.values():
            batch, count = one.batch, one.batch.seq_lens.shape[0]
            none = torch.zeros(count, dtype=torch.int32, device=self._device)
            verification = Verification([], self._config)
            kept = verification.accept(batch, none, one.next_ids, set())
            self._compaction.keep(kept)
            if batch.token_ids.shape[0] >= 2 * count:
                clones = copy.deepcopy(_step_rows(one))
                ids = torch.zeros(count, 1, dtype=torch.int64, device=self._device)
                tree = (None, None) if batch.tree_mask is None else (ids + 3, ids + 1)
                drafts = ops.DraftRows(ids, *tree)
                ops.update_step_inputs(clones, count, one.next_ids, kept.last, drafts, self._plan.block_size)

    def verify(
        self,
        step: ScheduledStep,
        inputs: StepInput,
        hidden: torch.Tensor,
        previous: SampledTokens | None,
        prompt_logprobs: PromptLogprobs,
        knows_drafts: bool = True,
    ) -> LaunchedVerification:
        """Draw a token for every draft and last token of the step, and judge the drafts by them.

        previous: of requests that do not draft, whose last token may still be on the device alone. knows_drafts: the
        requests hold them; if not, nothing that is drawn may depend on them.
        """
        batch = inputs.batch
        scheduled = [row for row in step.requests if row.samples]
        verification = Verification(scheduled, self._config)
        all_sample = verification.num_rows == step.num_scheduled_tokens
        rows = slice(verification.num_rows) if all_sample else batch.logits_indices
        logits = self._model.lm_head(self._model.final(hidden[rows]))
        if all(is_plain(row.request) for row in scheduled):
            tokens = self._sampler.greedy(logits)
        else:
            tokens = self._sampler.sample(
                verification.requests,
                logits,
                batch.positions[rows],
                previous,
                paths=verification.paths if knows_drafts else None,
                judge=verification.judge if verification.needs_judge else None,
            )
        next_ids = self.next_ids(step, inputs, tokens.token_ids)
        num_drafts = [row.num_drafts for row in step.requests]
        num_drafts += [0] * (batch.seq_lens.shape[0] - len(num_drafts))
        counts = to_device(num_drafts, torch.int32, self._device)
        kept = verification.accept(batch, counts, next_ids, tokens.dead_rows, self._kept.first(len(num_drafts)))
        if any(row.request.draft_parents for row in scheduled):
            self._compaction.keep(kept)
        paths = HostCopy((kept.paths,), is_urgent=True)
        taken = prompt_logprobs.take([row.request for row in scheduled])
        computed = ComputedRows(batch, hidden, next_ids, kept.last, kept, inputs.graph)
        return LaunchedVerification(step, verification, tokens, paths, taken, computed)

    def advance(self, step: ScheduledStep, inputs: StepInput, rows: ComputedRows, drafts: ops.DraftRows) -> StepInput:
        """Make a verified step's tensors those of the next, of the same requests with these drafts."""
        ops.update_step_inputs(
            _step_rows(rows), len(step.requests), rows.next_ids, rows.last, drafts, self._plan.block_size
        )
        if inputs.graph is not None:
            return inputs
        longest = min(inputs.batch.max_seq_len + inputs.batch.max_query_len, self._plan.max_model_len)
        return replace(inputs, batch=replace(inputs.batch, max_seq_len=longest))

    def next_ids(self, step: ScheduledStep, inputs: StepInput, drawn: torch.Tensor | None) -> torch.Tensor:
        """[T] int64: the token after each row, drawn or the prompt's next. drawn: after the rows that are sampled."""
        batch = inputs.batch
        num_tokens = batch.token_ids.shape[0]
        is_static = inputs.graph is not None
        next_ids = self._next_ids[:num_tokens] if is_static else torch.empty_like(batch.token_ids)
        if drawn is not None and len(drawn) == step.num_scheduled_tokens:
            next_ids[: len(drawn)].copy_(drawn)
            return next_ids
        known = [token_id for row in step.requests for token_id in _tokens_after(row)]
        next_ids[: len(known)].copy_(to_device(known, torch.int64, self._device))
        if drawn is not None:
            next_ids.index_copy_(0, batch.logits_indices, drawn)
        return next_ids


def _step_rows(rows: ComputedRows) -> ops.StepRows:
    batch = rows.batch
    tensors = batch.token_ids, batch.positions, batch.slot_mapping, batch.seq_lens, batch.block_tables
    return ops.StepRows(*tensors, batch.tree_mask)


def _tokens_after(row: ScheduledRequest) -> list[int]:
    """The known tokens after each row of a request, 0 where there is none yet."""
    start = row.num_computed_tokens + 1
    known = row.request.token_ids[start : start + row.num_scheduled_tokens]
    return known + [0] * (row.num_scheduled_tokens - len(known))
