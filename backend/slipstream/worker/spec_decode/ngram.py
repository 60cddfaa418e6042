"""Prompt lookup: drafts the tokens that followed the last n-gram earlier in the text or in a given reference.

No model and no device. Places are indexed by their last two tokens as the text grows, and those that end alike are
chained, so a look-up costs a few comparisons however long the text is. Sources: arXiv:2304.04487 (inference with
reference), prompt lookup; the chains are those of LZ77 in zlib.
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
MAX_KEPT_NGRAMS = 1 << 24  # of all requests together, at some 50 bytes each: 5.6 million tokens in n-grams of 2 to 4
MAX_LOOKS = 64  # places that end alike at which a look-up searches for a longer n-gram: at most some 7 us
_CHAINED = 2  # tokens of the n-grams whose places are chained, if longer and shorter ones are asked for


class NgramIndex:
    """Finds the last place of n-grams of `shortest` to `longest` tokens in a text that only grows.

    A place is the number of tokens before it. `_last` has the last place behind each n-gram of `_size` tokens, 32 bits
    a token in a key, and `_previous` the place before each that ends alike; 0: none. Longer n-grams are found by
    comparing tokens, the last MAX_LOOKS places back; shorter ones, of one token, have a dictionary of their own.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._longest = longest
        self._size = size = min(max(shortest, _CHAINED), longest)
        self._mask = (1 << 32 * size) - 1
        self._end_key = 0  # of the last `size` tokens
        self._last: dict[int, int] = {}
        self._previous: list[int] = []  # by place
        self._singles: dict[int, int] | None = {} if shortest < size else None  # the last place behind a token
        self.token_ids: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens. N-grams that end with the last token are not indexed yet: no token follows them."""
        start = place = len(self.token_ids)
        key, mask, size, last = self._end_key, self._mask, self._size, self._last
        last_of, note_previous = last.get, self._previous.append
        for token_id in token_ids:
            if place < size:
                note_previous(0)
            else:
                note_previous(last_of(key, 0))
                last[key] = place
            place += 1
            key = (key << 32 | token_id) & mask
        self._end_key = key
        self.token_ids += token_ids
        if self._singles is not None:
            first = max(start, 1)
            self._singles.update(zip(self.token_ids[first - 1 : -1], range(first, place)))

    def find(self, end: list[int]) -> int:
        """The last place behind the longest indexed n-gram that a text ends with; 0 if there is none. end: the last
        `longest` tokens of the text, or all of a shorter one."""
        key = 0
        for token_id in end[-self._size :]:
            key = key << 32 | token_id
        place = self._last.get(key, 0) if len(end) >= self._size else 0
        if not place:
            return self._singles.get(end[-1], 0) if self._singles and end else 0
        num_tokens = len(end)
        if place >= num_tokens and self.token_ids[place - num_tokens : place] == end:
            return place
        return self._longest_of(place, end)

    def continuation(self, end: list[int], num_tokens: int) -> list[int]:
        """The tokens behind the place that `find` finds; past the end of the text they repeat from there."""
        found = self.find(end)
        if not found:
            return []
        tokens = self.token_ids[found : found + num_tokens]
        while tokens and len(tokens) < num_tokens:
            tokens += tokens[: num_tokens - len(tokens)]
        return tokens

    def _longest_of(self, place: int, end: list[int]) -> int:
        """Among this place and those before it that end alike, the last one behind the most tokens of `end`."""
        token_ids, previous, size, most = self.token_ids, self._previous, self._size, len(end)
        found, longest = place, size
        if most == size:
            return found
        nearest = end[-size - 1]
        for _ in range(MAX_LOOKS):
            if token_ids[place - size - 1] == nearest and place > size:
                count = size + 1
                while count < most and count < place and token_ids[place - count - 1] == end[-count - 1]:
                    count += 1
                if count > longest:
                    found, longest = place, count
                    if count == most:
                        break
            place = previous[place]
            if not place:
                break
        return found


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
        self._max_tokens = MAX_KEPT_NGRAMS // (self._longest - self._shortest + 1)
        self._num_tokens = 0  # of all indices

    @staticmethod
    def refusal(params: SamplingParams) -> str | None:
        return None

    @staticmethod
    def planned(planning: Planning) -> DraftMemory:
        """Nothing: the indices are on the host."""
        return DraftMemory()

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftOutput]:
        return [DraftOutput(self._continue(one.request, one.num_drafts)) for one in requests]

    def seconds(self) -> dict[int, float]:
        return {}

    def forget(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            for indices in (self._texts, self._references):
                if index := indices.pop(sequence_id, None):
                    self._num_tokens -= len(index.token_ids)

    def _continue(self, request: RequestState, num_drafts: int) -> list[int]:
        """Look up the reference first: it is given because the output is expected to repeat it."""
        token_ids, text = request.token_ids, self._texts.get(request.sequence_id)
        if text is None or len(text.token_ids) < len(token_ids):
            text = self._grown(self._texts, request, token_ids)
        end = token_ids[-self._longest :]
        if request.params.reference_ids:
            reference = self._grown(self._references, request, request.params.reference_ids)
            drafts = reference.continuation(end, num_drafts)
            if drafts:
                return drafts
        return text.continuation(end, num_drafts)

    def _grown(self, indices: dict[int, NgramIndex], request: RequestState, token_ids: Sequence[int]) -> NgramIndex:
        """The request's index of these tokens, extended by MAX_INDEXED_TOKENS, or what MAX_KEPT_NGRAMS has left."""
        index = indices.get(request.sequence_id)
        if index is None:
            index = indices[request.sequence_id] = NgramIndex(self._shortest, self._longest)
        start = len(index.token_ids)
        if start < len(token_ids):
            added = token_ids[start : start + min(MAX_INDEXED_TOKENS, self._max_tokens - self._num_tokens)]
            self._num_tokens += len(added)
            index.extend(added)
        return index
