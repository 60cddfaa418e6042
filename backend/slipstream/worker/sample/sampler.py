"""Logits of a step -> token ids and log-probabilities. Engine thread.

A token depends on its own request alone (its logits, parameters, seed and position), so the same seed gives the same
text whatever the batch. Tensors of parameters are kept while the batch's composition is unchanged, and every feature
costs only the rows that use it. Only `PendingTokens.result` waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from slipstream_kernels import ops

from slipstream.core.outputs import TokenLogprobs
from slipstream.nn.parallel import SINGLE, Parallel
from slipstream.worker.host_copy import HostCopy, pack, to_device
from slipstream.worker.input_batch import SampledTokens
from slipstream.worker.interface import ProcessorReport
from slipstream.worker.request_state import RequestState
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
    until the next forward pass: those of plain requests may be in memory of a graph."""

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


class Draws(NamedTuple):
    """Arguments of ops.sample.  seeds: [num_rows] int64."""

    metadata: ops.SamplingMetadata
    seeds: torch.Tensor


_is_plain, _is_greedy = attrgetter("is_plain"), attrgetter("is_greedy")

# edited logits, the rows' parameters, positions, tokens drawn -> tokens
Judge = Callable[[torch.Tensor, Draws, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class _Composition:
    """Everything that stays the same while the same requests sample in the same order."""

    requests: list[RequestState]
    is_greedy: bool
    is_edited: bool
    is_processed: bool
    penalised: list[int]
    penalised_rows: torch.Tensor
    prompt_lens: torch.Tensor  # of the penalised rows
    penalties: ops.Penalties  # likewise
    with_logprobs: list[RequestState]
    logprob_rows: torch.Tensor
    logits_rows: torch.Tensor | None  # which of these rows are wanted whole
    asked_token_ids: torch.Tensor | None  # logprob_token_ids of these rows, padded with 0
    draws: Draws


class Sampler:
    """One per runner; vocab_size is the width of the logits. Several ranks have the same logits, and draw the same."""

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
        self._edits = LogitsProcessors(vocab_size, device)
        self._processors = NamedProcessors(processors or {}, device)
        self._masks = MaskApplier(vocab_size, device)
        self._composition: _Composition | None = None
        self._seen: tuple[list[RequestState], bool] = ([], True)  # the last requests, and whether they are plain

    def sample(
        self,
        requests: list[RequestState],
        logits: torch.Tensor,
        positions: torch.Tensor,
        previous: SampledTokens | None = None,
        paths: Paths | None = None,
        judge: Judge | None = None,
        masks: GrammarMasks | None = None,
    ) -> PendingTokens:
        """Draw one token per row. logits: [len(requests), vocab] in the model's dtype; may be changed in place.

        requests: per row; a request with drafts has consecutive rows, one for its last token and one per draft.
        positions: [len(requests)] int64, of each row's own token. Log-probabilities are those of the unchanged logits.
        previous: the tokens of the step before, if the host may not know them yet; of a step of plain requests alone a
        graph may have overwritten them, and none of those has penalties. paths: per row, the drafts before it.
        judge: may replace the drawn tokens. masks: of rows with a grammar.
        """
        if self.are_plain(requests):  # the largest is the largest in any dtype
            return PendingTokens(ops.greedy(logits))
        rows = self._compose(requests)
        logits = logits.float()
        original = logits[rows.logprob_rows] if rows.with_logprobs else None  # a copy: taken before the edits
        report = self._edit(requests, logits, rows, previous, paths)
        if masks is not None:
            self._masks.apply(logits, masks)
        token_ids = ops.greedy(logits) if rows.is_greedy else ops.sample(logits, *rows.draws, positions)
        if judge is not None:
            token_ids = judge(logits, rows.draws, positions, token_ids)
        if not rows.is_greedy or rows.is_processed:
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
        ops.greedy(logits)
        scores, one = logits.float(), torch.ones(1, device=self._device)
        ops.greedy(scores)
        metadata = ops.SamplingMetadata(one, one.int(), 0.5 * one, 0.5 * one)
        ops.sample(scores, metadata, one.long(), one.long())
        history, count = one.int()[None], one.int()
        ops.apply_penalties(scores, history, count, count, ops.Penalties(one, one, one))
        ops.apply_bias(scores, 0 * one.long(), one.long(), one)
        self._masks.warm_up(scores)
        warm_up_logprobs(scores, max_logprobs)

    def are_plain(self, requests: list[RequestState]) -> bool:
        """Whether all tokens are the argmax of unchanged logits. The same list has the same requests."""
        if self._seen[0] is not requests:
            self._seen = requests, all(map(_is_plain, requests))
        return self._seen[1]

    def _compose(self, requests: list[RequestState]) -> _Composition:
        if self._composition is None or self._composition.requests != requests:  # by identity
            special = [row for row, request in enumerate(requests) if not request.draws_by_itself]
            penalised = [row for row in special if requests[row].params.has_penalties]
            with_logprobs = [row for row in special if requests[row].params.logprobs is not None]
            is_edited = self._edits.compose(requests)
            self._processors.compose(requests)
            is_greedy = all(map(_is_greedy, requests))
            self._composition = _Composition(
                requests=requests,
                is_greedy=is_greedy,
                is_edited=is_edited,
                is_processed=any(requests[row].params.logits_processors for row in special),
                penalised=penalised,
                penalised_rows=self._ints(penalised, torch.int64),
                prompt_lens=self._ints([requests[row].num_prompt_tokens for row in penalised], torch.int32),
                penalties=self._penalties([requests[row] for row in penalised]),
                with_logprobs=[requests[row] for row in with_logprobs],
                logprob_rows=self._ints(with_logprobs, torch.int64),
                logits_rows=self._logits_rows([requests[row] for row in with_logprobs]),
                asked_token_ids=self._asked_token_ids([requests[row] for row in with_logprobs]),
                draws=draws_of(requests, self._device),
            )
        return self._composition

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

    def _edit(
        self,
        requests: list[RequestState],
        logits: torch.Tensor,
        rows: _Composition,
        previous: SampledTokens | None,
        paths: Paths | None,
    ) -> ProcessorReport | None:
        """Apply penalties, then the operator's processors, then biases and bans, each to its rows only, in place.
        Grammar masks come last."""
        if rows.penalised:
            penalised = [requests[row] for row in rows.penalised]
            penalised_paths = [paths[row] for row in rows.penalised] if paths else None
            for piece, history, num_tokens in self._history.read(penalised, previous, penalised_paths):
                part = logits[rows.penalised_rows[piece]]  # a copy
                lengths = rows.prompt_lens[piece], self._ints(num_tokens, torch.int32)
                ops.apply_penalties(part, history, *lengths, rows.penalties.of(piece))
                logits[rows.penalised_rows[piece]] = part
        report = self._processors.apply(logits, requests, paths) if rows.is_processed else None
        if rows.is_edited:
            self._edits.apply(logits, requests, paths)
        return report

    def _floats(self, values: list[float]) -> torch.Tensor:
        return to_device(values, torch.float32, self._device)

    def _ints(self, values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return to_device(values, dtype, self._device)


def draws_of(requests: Sequence[RequestState], device: torch.device) -> Draws:
    """Of a row of each request. A filter that no request uses is None, so that the kernel skips it. One copy."""
    temperature, top_k, top_p, min_p, seeds = zip(*[request.draw for request in requests])
    columns: dict[str, np.ndarray] = {
        "temperature": np.array(temperature, np.float32),
        "seeds": np.array(seeds, np.int64),
    }
    if any(top_k):
        columns["top_k"] = np.array(top_k, np.int32)
    if min(top_p) < 1.0:
        columns["top_p"] = np.array(top_p, np.float32)
    if any(min_p):
        columns["min_p"] = np.array(min_p, np.float32)
    packed = dict(zip(columns, pack(list(columns.values()), device)))
    filters = packed.get("top_k"), packed.get("top_p"), packed.get("min_p")
    return Draws(ops.SamplingMetadata(packed["temperature"], *filters), packed["seeds"])
