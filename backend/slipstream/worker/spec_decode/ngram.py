"""Prompt lookup: drafts the tokens that followed the last n-gram earlier in the text or in a given reference.

No model and no device. While a text goes on as at the place where its last drafts were taken from, the next ones are
taken from there. If not, its end is looked up: places are indexed by the two tokens before them, and those that end
alike are chained, so that this costs a few comparisons however long the text is. Sources: arXiv:2304.04487 (inference
with reference), prompt lookup; the chains are those of LZ77 in zlib.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.draft_methods import NgramOptions
from slipstream.core.sampling_params import SamplingParams
from slipstream.worker.request_state import RequestState
from slipstream.worker.spec_decode.interface import PROPOSERS, DraftOutput, DraftRequest, SpeculatorContext
from slipstream.worker.spec_decode.planning import DraftMemory, Planning

NUM_DRAFTS = 5
MAX_INDEXED_TOKENS = 1024  # of a request's text, and of its reference, in one step: some 0.2 ms of the engine's thread
MAX_INDEXED_IN_STEP = 1 << 13  # of all requests together, which may begin to draft in the same step: some 2 ms
MAX_KEPT_TOKENS = 6_000_000  # in the indices of all requests together, at 126 to 150 bytes each, whatever the sizes
MAX_LOOKS = 64  # places that end alike at which a look-up searches for a longer n-gram: at most some 7 us
_CHAINED = 2  # tokens of the n-grams whose places are chained, if longer and shorter ones are asked for


class NgramIndex:
    """Finds the last place of n-grams of `shortest` to `longest` tokens in a text that only grows.

    A place is the number of tokens before it. `_last` has the last place behind each two tokens (one, if `longest` is
    one), 32 bits a token in a key, and `_previous` the place before each that ends alike. Places before the first of
    them mean none. Longer n-grams are found by comparing tokens, at most MAX_LOOKS places back; shorter ones have a
    dictionary of their own. end_key: of the last ones.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._size = min(_CHAINED, longest)
        self._shift = 1 << 32 if self._size > 1 else 0
        self._last: dict[int, int] = {}
        self._previous: list[int] = []  # by place
        self._singles: dict[int, int] | None = {} if shortest < self._size else None  # the last place behind a token
        self.end_key = 0
        self.token_ids: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens. N-grams that end with the last token are not indexed yet: no token follows them."""
        start, key, shift, last = len(self.token_ids), self.end_key, self._shift, self._last
        last_of, note_previous = last.get, self._previous.append
        before = self.token_ids[-1] * shift if start else 0
        for place, token_id in enumerate(token_ids, start):
            note_previous(last_of(key, 0))
            last[key] = place
            key = before | token_id
            before = token_id * shift
        self.end_key = key
        self.token_ids += token_ids
        if self._singles is not None:
            first = max(start, 1)
            self._singles.update(zip(self.token_ids[first - 1 : -1], range(first, len(self.token_ids))))

    def key_of(self, end: list[int]) -> int:
        """The key of what a text ends with."""
        return end[-1] | (end[-2] * self._shift if len(end) > 1 else 0)

    def find(self, end: list[int], key: int) -> int:
        """The last place behind the longest indexed n-gram that a text ends with; 0 if there is none. end: the last
        `longest` tokens of the text, or all of a shorter one. key: of `end`."""
        place, num_tokens = self._last.get(key, 0), len(end)
        if place < self._size or num_tokens < self._size:
            return self._singles.get(end[-1], 0) if self._singles and end else 0
        if place >= num_tokens and self.token_ids[place - num_tokens : place] == end:
            return place if num_tokens >= self._shortest else 0
        return self._longest_of(place, end)

    def _longest_of(self, place: int, end: list[int]) -> int:
        """Among this place and those before it that end alike, the last one behind the most tokens of `end`; 0 if they
        are fewer than `shortest`."""
        token_ids, previous, size, most = self.token_ids, self._previous, self._size, len(end)
        found, longest = place, size
        nearest = end[-size - 1] if most > size else -1
        for _ in range(MAX_LOOKS if most > size else 0):
            if place > size and token_ids[place - size - 1] == nearest:
                count = size + 1
                while count < most and count < place and token_ids[place - count - 1] == end[-count - 1]:
                    count += 1
                if count > longest:
                    found, longest = place, count
                    if count == most:
                        break
            place = previous[place]
            if place < size:
                break
        return found if longest >= self._shortest else 0


class _Source:
    """Where the drafts of a request are taken from: a place in its reference, None: in its own text, which repeats what
    is before that place for longer than an n-gram. num_known: tokens of the text at that place."""

    __slots__ = ("_num_known", "_place", "_reference")

    def __init__(self, reference: Sequence[int] | None, place: int, num_known: int) -> None:
        self._reference, self._place, self._num_known = reference, place, num_known

    def follow(self, known: list[int], num_drafts: int) -> list[int]:
        """The tokens behind the place, moved by what the text has got since; past the end they repeat from there. None
        if the text has gone on otherwise, or the reference has ended."""
        first, num_known = self._place, len(known)
        place = first + num_known - self._num_known
        if self._reference is None:
            repeated, tokens = known[first:place], known[place : place + num_drafts]
        else:
            repeated, tokens = list(self._reference[first:place]), list(self._reference[place : place + num_drafts])
        if repeated != known[self._num_known :]:
            return []
        self._place, self._num_known = place, num_known
        return tokens if len(tokens) == num_drafts else (tokens * num_drafts)[:num_drafts]


@PROPOSERS.register("ngram")
class NgramProposer:
    """Keeps an index per request for its own text, and one for its reference.

    References take no KV blocks, and texts may share theirs, so the indices have a bound of their own: above it they do
    not grow, and what follows is not found, until other requests end.
    """

    drafts_trees = False
    num_scratch_slots = 0

    def __init__(self, context: SpeculatorContext) -> None:
        config = context.config.speculation
        options = config.options_of(NgramOptions)
        self.num_drafts = config.num_draft_tokens or NUM_DRAFTS
        self._longest = options.ngram_max
        self._shortest = min(options.ngram_min, options.ngram_max)
        self._texts: dict[int, NgramIndex] = {}
        self._references: dict[int, NgramIndex] = {}
        self._sources: dict[int, _Source] = {}
        self._max_tokens = MAX_KEPT_TOKENS
        self._num_tokens = 0  # of all indices
        self._num_left = 0  # tokens that may be indexed in this step

    @staticmethod
    def refusal(params: SamplingParams) -> str | None:
        return None

    @staticmethod
    def planned(planning: Planning) -> DraftMemory:
        """Nothing: the indices are on the host."""
        return DraftMemory()

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftOutput]:
        self._num_left = MAX_INDEXED_IN_STEP
        return [DraftOutput(self._continue(one.request, one.budget.num_drafts)) for one in requests]

    def chains(self, requests: Sequence[RequestState], num_drafts: int) -> list[list[int]]:
        self._num_left = MAX_INDEXED_IN_STEP
        return [self._continue(request, num_drafts) for request in requests]

    def seconds(self) -> dict[int, float]:
        return {}

    def forget(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._sources.pop(sequence_id, None)
            for indices in (self._texts, self._references):
                if index := indices.pop(sequence_id, None):
                    self._num_tokens -= len(index.token_ids)

    def _continue(self, request: RequestState, num_drafts: int) -> list[int]:
        """Go on where the last drafts were taken from while the text does, else look up where it goes on."""
        known, source = request.token_ids, self._sources.pop(request.sequence_id, None)
        drafts = [] if source is None else source.follow(known, num_drafts)
        if not drafts and (source := self._look_up(request)) is not None:
            drafts = source.follow(known, num_drafts)
        if drafts and source is not None:  # one that ends here never goes on, and would compare more with each token
            self._sources[request.sequence_id] = source
        return drafts

    def _look_up(self, request: RequestState) -> _Source | None:
        """In the reference first: it is given because the output is expected to repeat it."""
        known = request.token_ids
        text, end = self._grown(self._texts, request.sequence_id, known), known[-self._longest :]
        key = text.end_key if len(text.token_ids) == len(known) else text.key_of(end)
        if reference_ids := request.params.reference_ids:
            place = self._grown(self._references, request.sequence_id, reference_ids).find(end, key)
            if place:
                return _Source(reference_ids, place, len(known))
        place = text.find(end, key)
        return _Source(None, place, len(known)) if place else None

    def _grown(self, indices: dict[int, NgramIndex], sequence_id: int, token_ids: Sequence[int]) -> NgramIndex:
        """The request's index of these tokens, extended by MAX_INDEXED_TOKENS, or what is left of the other bounds."""
        index = indices.get(sequence_id)
        if index is None:
            index = indices[sequence_id] = NgramIndex(self._shortest, self._longest)
        start = len(index.token_ids)
        num_missing = len(token_ids) - start
        if num_missing > 0:
            num_left = min(self._max_tokens - self._num_tokens, self._num_left)
            if num_missing > MAX_INDEXED_TOKENS or num_missing > num_left:
                num_missing = min(MAX_INDEXED_TOKENS, num_left)
            self._num_tokens += num_missing
            self._num_left -= num_missing
            index.extend(token_ids[start : start + num_missing])
        return index
