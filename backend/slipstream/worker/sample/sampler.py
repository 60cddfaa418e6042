"""Logits of a step -> token ids and log-probabilities. Engine thread.

A token depends on its own request alone (its logits, parameters, seed and position), so the same seed gives the same
text whatever the batch. Tensors of parameters are kept while the batch's composition is unchanged, and every feature
costs only the rows that use it. Only `PendingTokens.result` waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import torch
from slipstream_kernels import ops

from slipstream.core.outputs import TokenLogprobs
from slipstream.nn.parallel import SINGLE, Parallel
from slipstream.worker.host_copy import HostCopy, to_device
from slipstream.worker.input_batch import SampledTokens
from slipstream.worker.interface import ProcessorReport
from slipstream.worker.request_state import RequestState
from slipstream.worker.sample.draws import Draws, draws_or_greedy, unedited_draws
from slipstream.worker.sample.logit_bias import LogitsProcessors
from slipstream.worker.sample.logprobs import logprob_columns, read_columns, warm_up_logprobs
from slipstream.worker.sample.named_processors import LogitsProcessor, NamedProcessors
from slipstream.worker.sample.penalties import Paths, TokenHistory
from slipstream.worker.sample.structured_output import GrammarMasks, MaskApplier


@dataclass(slots=True)
class Sampled:
    """token_ids: one per row. logprobs: by request id, of each of its rows."""

    token_ids: list[int]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


class PendingTokens:
    """Tokens drawn on the device, being copied to the host. token_ids: [number of rows] int64, on the device, valid
    until the next forward pass: those of requests that nobody edits may be in memory of a graph."""

    def __init__(
        self,
        token_ids: torch.Tensor,
        asked: Sequence[RequestState] = (),
        logprobs: tuple[torch.Tensor, ...] = (),
        logits: torch.Tensor | None = None,
        processors: ProcessorReport | None = None,
    ) -> None:
        """logits: of the rows among those asked for whose requests want them, fp32."""
        self.processors = processors
        self.token_ids = token_ids
        self._logits = None if logits is None else HostCopy((logits,))
        self._asked = asked  # for log-probabilities, in the order of `logprobs`' rows
        self._copy = HostCopy((token_ids, *logprobs))

    def seconds_since(self, other: PendingTokens) -> float | None:
        """Seconds on the device between the steps that drew both; both have been read."""
        return self._copy.seconds_since(other._copy)

    def result(self) -> Sampled:
        """Wait for this step, but not for those launched after it."""
        token_ids, *columns = self._copy.lists()
        if not columns:
            return Sampled(token_ids)
        params = [state.params for state in self._asked]
        num_top, asked = [p.logprobs or 0 for p in params], [p.logprob_token_ids for p in params]
        found = read_columns(num_top, columns, asked if len(columns) > 5 else ())
        if self._logits is not None:
            wanting = [entry for entry, p in zip(found, params) if p.return_generation_logits]
            for entry, row in zip(wanting, self._logits.rows(), strict=True):
                entry.logits = row
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for state, entry in zip(self._asked, found):
            logprobs.setdefault(state.sequence_id, []).append(entry)
        return Sampled(token_ids, logprobs)


_is_greedy, _draws_by_itself = attrgetter("is_greedy"), attrgetter("draws_by_itself")

# edited logits, the rows' parameters, positions, tokens drawn -> tokens
Judge = Callable[[torch.Tensor, Draws, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class _EditedRows:
    """The rows of a step whose logits are edited before they are drawn. Other numbers of rows count among these.

    rows: in the step. are_all: these are all rows of the step. draws: None if all are greedy.
    """

    rows: list[int]
    are_all: bool
    requests: list[RequestState]
    row_of: torch.Tensor
    draws: Draws | None
    is_biased: bool
    is_processed: bool
    penalised: list[int]
    penalised_rows: torch.Tensor
    prompt_lens: torch.Tensor  # of the penalised rows
    penalties: ops.Penalties  # likewise

    def of(self, paths: Paths | None) -> Paths | None:
        return paths and [paths[row] for row in self.rows]


@dataclass(slots=True)
class _Composition:
    """Everything that stays the same while the same requests sample in the same order. is_judged: all rows are edited,
    for somebody to look at their logits. draws: of the unedited rows; None if they are greedy, or there are none."""

    requests: list[RequestState]
    is_judged: bool
    are_agreed: bool  # ranks may draw differently
    edited: _EditedRows | None
    draws: Draws | None
    with_logprobs: list[RequestState]
    logprob_rows: torch.Tensor
    logits_rows: torch.Tensor | None  # which of these rows are wanted whole
    asked_token_ids: torch.Tensor | None  # logprob_token_ids of these rows, padded with 0


@dataclass(frozen=True, slots=True)
class RowContext:
    """What the edits of a step's rows depend on beside the requests' parameters.

    previous: the tokens of the step before, if the host may not know them yet; of a step of requests that nobody edits
    a graph may have overwritten them, and none of those has penalties. paths: per row, the drafts before it. masks: of
    rows with a grammar.
    """

    previous: SampledTokens | None = None
    paths: Paths | None = None
    masks: GrammarMasks | None = None


NO_CONTEXT = RowContext()


class Sampler:
    """One per runner; vocab_size is the width of the logits. Several ranks have the same logits, and draw the same.

    Logits are drawn in the model's dtype: kernels compute in fp32 anyway. Only rows that are edited, judged, or asked
    for their log-probabilities are copied to fp32.
    """

    def __init__(
        self,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        parallel: Parallel = SINGLE,
        processors: Mapping[str, LogitsProcessor] | None = None,
    ) -> None:
        self._device = device
        self._parallel = parallel
        self._history = TokenHistory(max_num_seqs, max_model_len, device)
        self._biases = LogitsProcessors(vocab_size, device)
        self._processors = NamedProcessors(processors or {}, device)
        self._masks = MaskApplier(vocab_size, device)
        self._composition: _Composition | None = None
        # the last requests, whether they are plain, and whether they draw by themselves
        self._seen: tuple[list[RequestState], bool, bool] = [], True, True

    def sample(
        self,
        requests: list[RequestState],
        logits: torch.Tensor,
        positions: torch.Tensor,
        context: RowContext = NO_CONTEXT,
        judge: Judge | None = None,
        drawn: torch.Tensor | None = None,
    ) -> PendingTokens:
        """Draw one token per row. logits: [len(requests), vocab] in the model's dtype; may be changed in place.

        requests: per row; a request with drafts has consecutive rows, one for its last token and one per draft.
        positions: [len(requests)] int64, of each row's own token. Log-probabilities are those of the unchanged logits.
        judge: may replace the drawn tokens. drawn: [len(requests)] int64, what a graph has drawn from the unedited
        logits.
        """
        rows = self._compose(requests, judge is not None)
        original = logits[rows.logprob_rows].float() if rows.with_logprobs else None  # a copy, before the edits
        edited, report = rows.edited, None
        token_ids = drawn
        if token_ids is None and (edited is None or not edited.are_all):
            token_ids = _draw(logits, rows.draws, positions)
        if edited is not None:
            scores = (logits if edited.are_all else logits[edited.row_of]).float()
            report = self._edit(scores, edited, context)
            own = _draw(scores, edited.draws, positions if edited.are_all else positions[edited.row_of])
            if judge is not None:
                assert edited.draws is not None, "greedy rows are not judged"
                own = judge(scores, edited.draws, positions, own)
            token_ids = own if edited.are_all or token_ids is None else token_ids.index_copy(0, edited.row_of, own)
        assert token_ids is not None
        if rows.are_agreed:
            token_ids = self._parallel.agree(token_ids)
        if original is None:
            return PendingTokens(token_ids, processors=report)
        max_top = max(request.params.logprobs or 0 for request in rows.with_logprobs)
        logprobs = logprob_columns(original, token_ids[rows.logprob_rows], max_top, rows.asked_token_ids)
        all_logits = None if rows.logits_rows is None else original[rows.logits_rows]
        return PendingTokens(token_ids, rows.with_logprobs, logprobs, all_logits, report)

    def warm_up(self, logits: torch.Tensor, max_logprobs: int) -> None:
        """Compile the kernels of whatever requests may ask for: else all would wait for the first one's. logits: [1,
        vocab] in the model's dtype. max_logprobs: of a request; -1: the vocabulary."""
        scores, one = logits.float(), torch.ones(1, device=self._device)
        for rows in (logits, scores):
            ops.greedy(rows)
            for filters in ((), (one.int(), 0.5 * one, 0.5 * one)):
                ops.sample(rows, ops.SamplingMetadata(one, *filters), one.long(), one.long())
        history, count = one.int()[None], one.int()
        ops.apply_penalties(scores, history, count, count, ops.Penalties(one, one, one))
        ops.apply_bias(scores, 0 * one.long(), one.long(), one)
        self._masks.warm_up(scores)
        warm_up_logprobs(scores, max_logprobs)

    def are_plain(self, requests: list[RequestState]) -> bool:
        """Whether all tokens are the argmax of unchanged logits. The same list has the same requests."""
        return self._see(requests)[1]

    def draw_by_themselves(self, requests: list[RequestState]) -> bool:
        """Whether all tokens depend on the unchanged logits alone, of which nothing else is wanted. Likewise."""
        return self._see(requests)[2]

    def _see(self, requests: list[RequestState]) -> tuple[list[RequestState], bool, bool]:
        if self._seen[0] is not requests:
            by_themselves = all(map(_draws_by_itself, requests))
            self._seen = requests, by_themselves and all(map(_is_greedy, requests)), by_themselves
        return self._seen

    def _compose(self, requests: list[RequestState], is_judged: bool) -> _Composition:
        kept = self._composition
        if kept is not None and kept.requests == requests and kept.is_judged == is_judged:  # by identity
            return kept
        edited = self._compose_edited(requests, is_judged)
        are_all = edited is not None and edited.are_all
        draws = None if are_all else unedited_draws(requests, self._device)
        special = () if self.draw_by_themselves(requests) else enumerate(requests)
        with_logprobs = [row for row, request in special if request.params.logprobs is not None]
        asking = [requests[row] for row in with_logprobs]
        self._composition = _Composition(
            requests=requests,
            is_judged=is_judged,
            are_agreed=draws is not None or (edited is not None and (edited.draws is not None or edited.is_processed)),
            edited=edited,
            draws=draws,
            with_logprobs=asking,
            logprob_rows=self._ints(with_logprobs, torch.int64),
            logits_rows=self._logits_rows(asking),
            asked_token_ids=self._asked_token_ids(asking),
        )
        return self._composition

    def _compose_edited(self, all_requests: list[RequestState], is_judged: bool) -> _EditedRows | None:
        if self.draw_by_themselves(all_requests) and not is_judged:
            return None
        rows = [row for row, request in enumerate(all_requests) if is_judged or request.is_edited]
        if not rows:
            return None
        are_all = len(rows) == len(all_requests)
        requests = all_requests if are_all else [all_requests[row] for row in rows]
        penalised = [row for row, request in enumerate(requests) if request.params.has_penalties]
        self._processors.compose(requests)
        return _EditedRows(
            rows=rows,
            are_all=are_all,
            requests=requests,
            row_of=self._ints(rows, torch.int64),
            draws=draws_or_greedy(requests, self._device),
            is_biased=self._biases.compose(requests),
            is_processed=any(request.params.logits_processors for request in requests),
            penalised=penalised,
            penalised_rows=self._ints(penalised, torch.int64),
            prompt_lens=self._ints([requests[row].num_prompt_tokens for row in penalised], torch.int32),
            penalties=self._penalties([requests[row] for row in penalised]),
        )

    def _asked_token_ids(self, requests: list[RequestState]) -> torch.Tensor | None:
        asked = [request.params.logprob_token_ids for request in requests]
        width = max(map(len, asked), default=0)
        if not width:
            return None
        return to_device([[*ids, *[0] * (width - len(ids))] for ids in asked], torch.int64, self._device)

    def _logits_rows(self, requests: list[RequestState]) -> torch.Tensor | None:
        rows = [row for row, request in enumerate(requests) if request.params.return_generation_logits]
        return self._ints(rows, torch.int64) if rows else None

    def _penalties(self, requests: list[RequestState]) -> ops.Penalties:
        params = [request.params for request in requests]
        return ops.Penalties(
            repetition=self._floats([p.repetition_penalty for p in params]),
            presence=self._floats([p.presence_penalty for p in params]),
            frequency=self._floats([p.frequency_penalty for p in params]),
        )

    def _edit(self, logits: torch.Tensor, edited: _EditedRows, context: RowContext) -> ProcessorReport | None:
        """Apply penalties, then the operator's processors, then biases and bans, then grammar masks, each to its rows
        only, in place. logits: of the edited rows. The context and the report count rows of the step."""
        requests, paths, masks = edited.requests, edited.of(context.paths), context.masks
        if edited.penalised:
            penalised = [requests[row] for row in edited.penalised]
            penalised_paths = [paths[row] for row in edited.penalised] if paths else None
            for piece, history, num_tokens in self._history.read(penalised, context.previous, penalised_paths):
                part = logits[edited.penalised_rows[piece]]  # a copy
                lengths = edited.prompt_lens[piece], self._ints(num_tokens, torch.int32)
                ops.apply_penalties(part, history, *lengths, edited.penalties.of(piece))
                logits[edited.penalised_rows[piece]] = part
        report = self._processors.apply(logits, requests, paths) if edited.is_processed else None
        if edited.is_biased:
            self._biases.apply(logits, requests, paths)
        if masks is not None:
            self._masks.apply(logits, masks if edited.are_all else masks.among(edited.rows))
        if report is not None and report.dead_rows:
            report = replace(report, dead_rows=[edited.rows[row] for row in report.dead_rows])
        return report

    def _floats(self, values: list[float]) -> torch.Tensor:
        return to_device(values, torch.float32, self._device)

    def _ints(self, values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return to_device(values, dtype, self._device)


def _draw(logits: torch.Tensor, draws: Draws | None, positions: torch.Tensor) -> torch.Tensor:
    return ops.greedy(logits) if draws is None else ops.sample(logits, *draws, positions)
