"""The worker's state of each request, from NewRequest to `forget`. Engine thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from struct import Struct

import numpy as np

from slipstream.core.sampling_params import SamplingParams
from slipstream.worker.block_tables import values_of
from slipstream.worker.interface import NewRequest, StepInput, Updates

# By what a row of logits is drawn, as kernels take it, and the same for making one, which NumPy takes 2 us for.
# seeds: any 64 bits.
_DRAW_FIELDS = {"seeds": "q", "temperature": "f", "top_k": "i", "top_p": "f", "min_p": "f"}
DRAW_ROW = np.dtype([(name, f"<{kind}") for name, kind in _DRAW_FIELDS.items()])
_DRAW = Struct(f"<{''.join(_DRAW_FIELDS.values())}")
_GREEDY_DRAW = _DRAW.pack(0, 0.0, 0, 1.0, 0.0)


class RequestState:
    """One request. token_ids: prompt and output, complete only for requests whose text the worker reads.
    num_drawn_tokens: output tokens including the one that the current step draws; only for requests with
    counts_tokens. block_ids: of the first KV group, which drafters' caches share.

    What a batch asks of each of its requests whenever one joins or leaves is found out once, here.
    counts_tokens: whether a draw depends on the number of tokens drawn before. is_edited: whether logits change before
    it. is_plain: whether the next token is the argmax of the unchanged logits. draw: the bytes of a DRAW_ROW.
    unedited_draw: of one from the unchanged logits, greedy where nobody takes that token. draws_plainly: it is greedy.
    """

    def __init__(self, new: NewRequest, num_full_groups: int = 1) -> None:
        self.sequence_id = new.sequence_id
        self.prompt_token_ids = new.prompt_token_ids  # shared by the sequences of one client request
        self.token_ids = [*new.prompt_token_ids, *new.output_token_ids]
        self.params = new.params
        self.seed = new.seed
        self.block_ids = new.block_ids[::num_full_groups]
        self.block_hashes = list(new.block_hashes)
        self.num_preemptions = new.num_preemptions
        self.early_token_ids = new.early_token_ids
        self.end_token_ids = new.end_token_ids
        self.draft_method = new.draft_method
        self.acceptance = new.acceptance
        self.has_grammar = new.has_grammar
        self.adapter_slot = new.adapter_slot
        self.prompt_rows = new.prompt_rows
        self.num_drawn_tokens = len(new.output_token_ids)
        params = new.params
        self.is_greedy = params.is_greedy
        self.has_edits = has_edits(params)
        self.counts_tokens = self.has_edits or params.has_penalties
        self.is_edited = is_edited(params, new.has_grammar)
        self.draws_by_itself = draws_by_itself(params, new.has_grammar)
        self.is_plain = self.is_greedy and self.draws_by_itself
        filters = max(0, params.top_k), params.top_p, params.min_p
        self.draw = _DRAW.pack(_signed(new.seed), params.temperature, *filters)
        self.unedited_draw = _GREEDY_DRAW if self.is_edited else self.draw
        self.draws_plainly = self.is_greedy or self.is_edited

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)


def has_edits(params: SamplingParams) -> bool:
    """Whether logits are biased, or tokens banned, before a token is drawn."""
    asked = params.logit_bias or params.embedding_bias or params.bad_words_ids or params.min_tokens
    return bool(asked or params.allowed_token_ids)


def draws_by_itself(params: SamplingParams, has_grammar: bool) -> bool:
    """Whether tokens depend only on logits, parameters and positions, and no log-probabilities are wanted."""
    return params.logprobs is None and not is_edited(params, has_grammar)


def is_edited(params: SamplingParams, has_grammar: bool) -> bool:
    """Whether anything changes a request's logits before a token is drawn."""
    return bool(params.has_penalties or has_edits(params) or params.logits_processors or has_grammar)


def _signed(seed: int) -> int:
    """The lower 64 bits of a seed, as a signed number."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >= 1 << 63 else seed


class RequestStates:
    """All requests that the worker knows. num_full_groups: KV groups whose blocks take turns in block_ids."""

    def __init__(self, num_full_groups: int = 1) -> None:
        self._num_full_groups = num_full_groups
        self._states: dict[int, RequestState] = {}
        self._counting: set[int] = set()  # requests with counts_tokens
        self._not_plain: set[int] = set()
        self._with_prompt_logprobs: set[int] = set()
        self._with_prompt_rows: set[int] = set()
        self._last_ids: Sequence[int] = ()
        self._last: list[RequestState] = []

    def add(self, new: NewRequest) -> RequestState:
        state = self._states[new.sequence_id] = RequestState(new, self._num_full_groups)
        self._last_ids = ()
        if state.counts_tokens:
            self._counting.add(new.sequence_id)
        if not state.is_plain:
            self._not_plain.add(new.sequence_id)
        if new.params.prompt_logprobs is not None:
            self._with_prompt_logprobs.add(new.sequence_id)
        if new.prompt_rows is not None:
            self._with_prompt_rows.add(new.sequence_id)
        return state

    def update(self, updates: Updates) -> None:
        """Apply changes; those of forgotten requests are ignored."""
        for sequence_id, block_ids in updates.block_ids.items():
            if (state := self._states.get(sequence_id)) is not None:
                state.block_ids += block_ids[:: self._num_full_groups]
        for sequence_id, token_ids in updates.output_token_ids.items():
            if (state := self._states.get(sequence_id)) is not None:
                state.token_ids += token_ids
        for sequence_id, block_hashes in updates.block_hashes.items():
            if (state := self._states.get(sequence_id)) is not None:
                state.block_hashes += block_hashes

    def of(self, sequence_ids: Sequence[int]) -> list[RequestState]:
        """The same list again for the same ids."""
        if not self._last_ids or sequence_ids != self._last_ids:
            self._last_ids, self._last = sequence_ids, list(values_of(self._states, sequence_ids))
        return self._last

    @property
    def by_id(self) -> Mapping[int, RequestState]:
        return self._states

    def get(self, sequence_id: int) -> RequestState | None:
        return self._states.get(sequence_id)

    def count_drawn(self, step: StepInput, states: Sequence[RequestState]) -> None:
        """Set num_drawn_tokens for a step that is about to draw."""
        if not self._counting:
            return
        for index, state in enumerate(states):
            if state.counts_tokens:
                end = step.num_computed_tokens[index] + step.num_scheduled_tokens[index] - step.num_drafts[index]
                state.num_drawn_tokens = end + 1 - state.num_prompt_tokens

    @property
    def all_plain(self) -> bool:
        """Whether every request is plain."""
        return not self._not_plain

    @property
    def any_prompt_logprobs(self) -> bool:
        """Whether any request has asked for log-probabilities of its prompt."""
        return bool(self._with_prompt_logprobs)

    @property
    def any_prompt_rows(self) -> bool:
        """Whether any request has brought embeddings of its prompt."""
        return bool(self._with_prompt_rows)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        self._last_ids, self._last = (), []
        for sequence_id in sequence_ids:
            self._states.pop(sequence_id, None)
            self._counting.discard(sequence_id)
            self._not_plain.discard(sequence_id)
            self._with_prompt_logprobs.discard(sequence_id)
            self._with_prompt_rows.discard(sequence_id)
