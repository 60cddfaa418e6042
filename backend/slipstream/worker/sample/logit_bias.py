"""Logits processors: biases, allowed tokens, bans of bad words, and of end tokens before min_tokens. Engine thread.

Fixed biases of a request (up to one per token of the vocabulary) become tensors when it first samples. Bans that depend
on its text are computed every step, at a cost that does not depend on the number of words. Each row depends on its own
request only.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from slipstream_kernels import ops

from slipstream.core.bad_words import BadWords
from slipstream.core.word_automaton import ROOT
from slipstream.worker.host_copy import to_device
from slipstream.worker.request_state import RequestState
from slipstream.worker.sample.penalties import Paths

# Finite, unlike a grammar's -inf: whatever is banned, a token of the grammar is drawn, and rows never become NaN. Each
# outweighs those above it together: if all tokens are banned, one of the highest of these is drawn. A bad word or a
# token that is not allowed is then refused by engine/token_rules.py; an end token is not.
EARLY = -1e29  # end tokens before min_tokens
UNLISTED_END = 5 * EARLY  # end tokens that are not allowed, while a grammar says where the text may end
BANNED = 10 * EARLY  # bad words
NOT_ALLOWED = 2 * BANNED
_MAX_KEPT_BANS = 64  # tensors of one request, each of the tokens that complete a bad word

_Key = tuple[int, frozenset[int], frozenset[int]]
Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # rows, token ids, what is added there


class _Asked(NamedTuple):
    """Tensors of one SamplingParams, on the device. token_ids, values: fixed biases. dense: a bias per token of the
    vocabulary, or None. early: end tokens, banned before min_tokens. kept: the allowed tokens, empty for all, and
    what is added to them."""

    token_ids: torch.Tensor
    values: torch.Tensor
    dense: torch.Tensor | None
    early: torch.Tensor
    kept: torch.Tensor
    kept_values: torch.Tensor


@dataclass(slots=True)
class _Edits:
    """Edits of one request. asked: shared by the n sequences of a client request. state: of the bad words' automaton
    after num_seen output tokens."""

    asked: _Asked
    words: BadWords
    state: int = ROOT
    num_seen: int = 0
    bans: dict[int, torch.Tensor] = field(default_factory=dict)  # by state


class LogitsProcessors:
    """One per sampler: edits of the requests that sample together, kept while the composition is unchanged.

    vocab_size: the width of the logits. Raises AssertionError for a token outside it, which input_processor.py refuses.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._edits: dict[int, _Edits] = {}  # by sequence_id
        self._rows: list[int] = []
        self._fixed: Columns | None = None
        self._dense: tuple[torch.Tensor, torch.Tensor] | None = None  # rows, their biases [len(rows), vocab]
        self._allowed: tuple[torch.Tensor, Columns] | None = None  # rows, and their tokens that are kept
        self._early_rows: list[int] = []  # whose columns are in _early
        self._early: Columns | None = None

    def compose(self, requests: list[RequestState]) -> bool:
        """Set the requests of the following steps, in row order. Returns whether any has edits."""
        self._rows = [row for row, request in enumerate(requests) if request.has_edits]
        known, self._edits = self._edits, {}
        asked: dict[_Key, _Asked] = {}
        for request in (requests[row] for row in self._rows):
            edits = self._edits[request.sequence_id] = known.get(request.sequence_id) or self._read(request, asked)
            asked[_key(request)] = edits.asked
        each = [self._edits[requests[row].sequence_id].asked for row in self._rows]
        self._fixed = self._columns(self._rows, [one.token_ids for one in each], [one.values for one in each])
        dense = [(row, one.dense) for row, one in zip(self._rows, each) if one.dense is not None]
        self._dense = None
        if dense:
            rows = to_device([row for row, _ in dense], torch.int64, self._device)
            self._dense = rows, torch.stack([biases for _, biases in dense])
        self._allowed = self._columns_of_allowed(list(zip(self._rows, each)))
        self._early_rows, self._early = [], None
        return bool(self._rows)

    def apply(self, logits: torch.Tensor, requests: list[RequestState], paths: Paths | None = None) -> None:
        """Edit logits in place: [num_rows, vocab] fp32. requests: those of the last `compose`.

        paths: per row, the drafts after its request's tokens.
        """
        early_rows: list[int] = []
        ban_rows: list[int] = []
        bans: list[torch.Tensor] = []
        for row in self._rows:
            request, path = requests[row], paths[row] if paths else ()
            edits = self._edits[request.sequence_id]
            if request.num_drawn_tokens + len(path) <= request.params.min_tokens:
                early_rows.append(row)
            if request.params.bad_words_ids and (banned := self._banned_after(request, edits, path)).numel():
                ban_rows.append(row)
                bans.append(banned)
        if early_rows != self._early_rows:
            early = [self._edits[requests[row].sequence_id].asked.early for row in early_rows]
            self._early_rows, self._early = early_rows, self._columns(early_rows, early, EARLY)
        if self._allowed is not None:
            rows, (row_of, token_ids, values) = self._allowed
            kept = logits[row_of, token_ids] + values
            logits.index_fill_(0, rows, NOT_ALLOWED)
            logits[row_of, token_ids] = kept
        if self._dense is not None:
            logits.index_add_(0, *self._dense)
        for columns in (self._fixed, self._early, self._columns(ban_rows, bans)):
            if columns is not None:
                ops.apply_bias(logits, *columns)

    def _columns(
        self, rows: Sequence[int], token_ids: list[torch.Tensor], values: list[torch.Tensor] | float = BANNED
    ) -> Columns | None:
        """One entry per row and token. values: one for all, or of each."""
        counts = [tokens.numel() for tokens in token_ids]
        if not any(counts):
            return None
        flat = to_device([*rows, *counts], torch.int64, self._device).view(2, -1)
        row_of = torch.repeat_interleave(flat[0], flat[1], output_size=sum(counts))
        if isinstance(values, float):
            return row_of, torch.cat(token_ids), torch.full_like(row_of, values, dtype=torch.float32)
        return row_of, torch.cat(token_ids), torch.cat(values)

    def _columns_of_allowed(self, each: list[tuple[int, _Asked]]) -> tuple[torch.Tensor, Columns] | None:
        limited = [(row, one) for row, one in each if one.kept.numel()]
        rows = [row for row, _ in limited]
        columns = self._columns(rows, [one.kept for _, one in limited], [one.kept_values for _, one in limited])
        return columns and (to_device(rows, torch.int64, self._device), columns)

    def _read(self, request: RequestState, known: Mapping[_Key, _Asked]) -> _Edits:
        words = request.params.bad_words_automaton
        asked = known.get(_key(request))
        if asked is not None:
            return _Edits(asked, words)
        params = request.params
        values: dict[int, float] = {}
        for token_id, bias in params.logit_bias:
            values[token_id] = values.get(token_id, 0.0) + bias
        for word in params.bad_words_ids:
            if len(word) == 1:
                values[word[0]] = BANNED
        biases = to_device(list(values.values()), torch.float32, self._device)
        early = self._ids(sorted(request.early_token_ids))
        kept = dict.fromkeys(params.allowed_token_ids or (), 0.0)
        if kept:
            kept = {**dict.fromkeys(request.end_token_ids, UNLISTED_END), **kept}
        kept_values = to_device(list(kept.values()), torch.float32, self._device)
        dense = self._biases(params.embedding_bias)
        return _Edits(_Asked(self._ids(list(values)), biases, dense, early, self._ids(list(kept)), kept_values), words)

    def _biases(self, biases: Sequence[float]) -> torch.Tensor | None:
        if not biases:
            return None
        padded = torch.zeros(self._vocab_size)
        count = min(len(biases), self._vocab_size)
        padded[:count] = torch.frombuffer(array("f", biases[:count]), dtype=torch.float32)
        return padded.to(self._device)

    def _banned_after(self, request: RequestState, edits: _Edits, path: tuple[int, ...]) -> torch.Tensor:
        """Tokens that would complete a bad word after the request's tokens and the drafts of `path`."""
        if request.num_output_tokens < edits.num_seen:
            edits.state, edits.num_seen = ROOT, 0
        for token_id in request.token_ids[request.num_prompt_tokens + edits.num_seen :]:
            edits.state = edits.words.step(edits.state, token_id)
        edits.num_seen = request.num_output_tokens
        state = edits.state
        for token_id in path:
            state = edits.words.step(state, token_id)
        banned = edits.bans.get(state)
        if banned is None:
            if len(edits.bans) >= _MAX_KEPT_BANS:
                edits.bans.clear()
            banned = edits.bans[state] = self._ids(edits.words.banned(state))
        return banned

    def _ids(self, token_ids: list[int]) -> torch.Tensor:
        """Token ids on the device; checked on the host, because a kernel's check would have to be waited for."""
        if token_ids:
            assert min(token_ids) >= 0 and max(token_ids) < self._vocab_size, "an edit outside the vocabulary"
        return to_device(token_ids, torch.int64, self._device)


def _key(request: RequestState) -> _Key:
    """Requests with the same key share their tensors."""
    return id(request.params), request.early_token_ids, request.end_token_ids
