"""Verifier: draws a token after every draft of a step, accepts drafts, and makes the inputs of the next step.

Engine thread. All of it is launched behind the forward pass and runs on the device, so that heads can draft again
before the host has read anything. Which drafts are accepted is decided in verification.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import torch
from slipstream_kernels import ops

from slipstream.core.config import SpeculationConfig
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.decoder import Decoder
from slipstream.worker.cuda_graphs import StepGraphs
from slipstream.worker.graph_shapes import GraphShape
from slipstream.worker.host_copy import HostCopy, to_device
from slipstream.worker.input_batch import SampledTokens
from slipstream.worker.kv_cache import Compaction
from slipstream.worker.launched_step import ComputedRows, LaunchedSample, RunningStep, StepTensors
from slipstream.worker.memory_plan import MemoryPlan
from slipstream.worker.sample.logprobs import NO_PROMPTS, PromptLogprobs
from slipstream.worker.sample.sampler import PendingTokens, RowContext, Sampler
from slipstream.worker.sample.structured_output import GrammarMasks
from slipstream.worker.spec_decode.verification import DraftedRequest, Verification
from slipstream.worker.spec_decode.warm_up import warm_up_acceptance


class Verifier:
    """capacity: number of tokens of the largest graph and number of requests of the largest step. compactions: of each
    KV group, none if accepted branches are moved elsewhere.

    Returned tensors are valid until the next call.
    """

    def __init__(
        self,
        model: Decoder,
        sampler: Sampler,
        compactions: Sequence[Compaction],
        config: SpeculationConfig,
        plan: MemoryPlan,
        capacity: tuple[int, int],
    ) -> None:
        num_tokens, num_requests = capacity
        self._model, self._sampler, self._compactions, self._config = model, sampler, compactions, config
        self._plan, self._device = plan, model.context.device
        self._next_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        self._accepted = ops.empty_accepted_rows(num_requests, self._device)
        self._first_accepted: dict[int, ops.AcceptedRows] = {}  # by number of requests
        self._last_counts = list[int](), torch.empty(0, dtype=torch.int32, device=self._device)

    def rows_of_graphs(self, graphs: StepGraphs[GraphShape]) -> list[ComputedRows]:
        """The static tensors of every graph of a verification, for drafting to be captured behind it."""
        found = []
        for shape in graphs.shapes:
            if shape.is_verification:
                batch, hidden = graphs.tensors(shape)
                accepted, next_ids = self._accepted_of(shape.num_requests), self._next_ids[: shape.num_tokens]
                found.append(ComputedRows(batch, hidden, next_ids, accepted.last, accepted, shape))
        return found

    def warm_up(self, batch: ForwardBatch, hidden: torch.Tensor) -> ComputedRows:
        """Compile what verifications run, on a step of padding_drafts, whose rows are returned for drafting."""
        accepted = ops.empty_accepted_rows(1, self._device)  # not those that graphs read
        warm_up_acceptance(batch, accepted, self._compactions, self._plan.block_size)
        return ComputedRows(batch, hidden, torch.zeros_like(batch.token_ids), accepted.last, accepted)

    def verify(
        self,
        running: RunningStep,
        drafted: Sequence[DraftedRequest],
        prompt_logprobs: PromptLogprobs,
        previous: SampledTokens | None = None,
        masks: GrammarMasks | None = None,
        is_ahead: bool = False,
    ) -> LaunchedSample:
        """Draw a token for every draft and last token of the step, and accept drafts by them.

        drafted: the requests that sample; none if all are plain. previous: the step before, whose tokens the host may
        not know yet, for requests without drafts. is_ahead: only the device knows the drafts, so no draw may depend on
        them.
        """
        step, batch = running.step, running.tensors.batch
        num_drafts = step.num_drafts if all(step.samples) else list(compress(step.num_drafts, step.samples))
        verification = Verification(num_drafts, drafted, self._config)
        all_sample = verification.num_rows == len(step.token_ids)
        rows = slice(verification.num_rows) if all_sample else batch.logits_indices
        is_whole = all_sample and running.hidden.shape[0] == verification.num_rows
        logits = self._model.raw_logits(running.hidden if is_whole else running.hidden[rows])
        if not drafted:
            tokens = PendingTokens(ops.greedy(logits))
        else:
            context = RowContext(previous, None if is_ahead else verification.paths, masks)
            judge = verification.judge if verification.needs_judge else None
            tokens = self._sampler.sample(verification.states, logits, batch.positions[rows], context, judge)
        for found in (masks, tokens.processors):
            verification.bury(found.dead_rows if found is not None else (), self._device)
        verification.agree(self._model.context.parallel, self._device)
        next_ids = self.next_ids(running, tokens.token_ids)
        counts = self._counts_of(step.num_drafts, batch.seq_lens.shape[0])
        accepted = verification.accept(batch, counts, next_ids, self._accepted_of(counts.shape[0]))
        if step.draft_parents and self._compactions:
            self._compact(verification, batch, counts, next_ids, accepted)
        paths = HostCopy((accepted.paths,), is_urgent=True)
        taken = prompt_logprobs.take(step, running.states) if running.asks_prompt_logprobs else NO_PROMPTS
        computed = ComputedRows(batch, running.hidden, next_ids, accepted.last, accepted, running.tensors.graph)
        return LaunchedSample(tokens, taken, paths, computed)

    def advance(
        self, num_requests: int, tensors: StepTensors, rows: ComputedRows, drafts: ops.DraftRows
    ) -> StepTensors:
        """Make a verified step's tensors those of the next, of the same requests with these drafts."""
        batch = rows.batch
        for own in batch.other_groups:  # before the rows are overwritten: only their slots differ
            copies = replace(
                batch,
                token_ids=batch.token_ids.clone(),
                positions=batch.positions.clone(),
                seq_lens=batch.seq_lens.clone(),
                tree_mask=None if batch.tree_mask is None else batch.tree_mask.clone(),
                block_tables=own.block_tables,
                slot_mapping=own.slot_mapping,
            )
            self._update(replace(rows, batch=copies), num_requests, drafts)
        self._update(rows, num_requests, drafts)
        if tensors.graph is not None:
            return tensors
        longest = min(tensors.batch.max_seq_len + tensors.batch.max_query_len, self._plan.max_model_len)
        return replace(tensors, batch=replace(tensors.batch, max_seq_len=longest))

    def _accepted_of(self, num_requests: int) -> ops.AcceptedRows:
        """The first of the static rows. Five views are not made anew in each step."""
        found = self._first_accepted.get(num_requests)
        if found is None:
            found = self._first_accepted[num_requests] = self._accepted.first(num_requests)
        return found

    def _counts_of(self, num_drafts: list[int], num_requests: int) -> torch.Tensor:
        """[num_requests] int32: the numbers of drafts, and 0 for padding. The same tensor again for the same numbers,
        as nearly all steps behind a head have."""
        last_drafts, counts = self._last_counts
        if num_drafts != last_drafts or counts.shape[0] != num_requests:
            padded = [*num_drafts, *[0] * (num_requests - len(num_drafts))]
            counts = to_device(padded, torch.int32, self._device)
            self._last_counts = num_drafts, counts
        return counts

    def _update(self, rows: ComputedRows, num_requests: int, drafts: ops.DraftRows) -> None:
        ops.update_step_inputs(_step_rows(rows), num_requests, rows.next_ids, rows.last, drafts, self._plan.block_size)

    def _compact(
        self,
        verification: Verification,
        batch: ForwardBatch,
        num_drafts: torch.Tensor,
        next_ids: torch.Tensor,
        accepted: ops.AcceptedRows,
    ) -> None:
        """Move the keys of accepted rows in every KV group. accepted: of the first."""
        self._compactions[0].keep(accepted)
        for group in range(1, 1 + len(batch.other_groups)):
            self._compactions[group].keep(verification.accept(batch.of_group(group), num_drafts, next_ids))

    def next_ids(self, running: RunningStep, drawn: torch.Tensor | None) -> torch.Tensor:
        """[T] int64: the token after each row, drawn or the prompt's next. drawn: after the rows that are sampled."""
        batch, step = running.tensors.batch, running.step
        num_tokens = batch.token_ids.shape[0]
        is_static = running.tensors.graph is not None
        next_ids = self._next_ids[:num_tokens] if is_static else torch.empty_like(batch.token_ids)
        if drawn is not None and drawn.shape[0] == len(step.token_ids):
            own = next_ids if drawn.shape[0] == num_tokens else next_ids[: drawn.shape[0]]
            own.copy_(drawn)
            return next_ids
        known: list[int] = []
        lists = running.states, step.num_computed_tokens, step.num_scheduled_tokens, step.samples, step.num_drafts
        for state, start, count, samples, num_drafts in zip(*lists):
            if samples and count == 1 + num_drafts:  # all of its rows are drawn
                known += [0] * count
                continue
            following = state.token_ids[start + 1 : start + 1 + count]  # 0 where there is none yet
            known += following + [0] * (count - len(following))
        next_ids[: len(known)].copy_(to_device(known, torch.int64, self._device))
        if drawn is not None:
            next_ids.index_copy_(0, batch.logits_indices, drawn)
        return next_ids


def _step_rows(rows: ComputedRows) -> ops.StepRows:
    batch = rows.batch
    tensors = batch.token_ids, batch.positions, batch.slot_mapping, batch.seq_lens, batch.block_tables
    return ops.StepRows(*tensors, batch.tree_mask)
