"""Prompt lookup: drafts the tokens that followed the last n-gram earlier in the text or in a given reference.

No model and no device. Every n-gram of up to ngram_max tokens is indexed as the text grows, so a look-up costs a few
dictionary accesses however long the text is. Sources: arXiv:2304.04487 (inference with reference), prompt lookup.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.draft_methods import NgramOptions
from slipstream.core.sampling_params import SamplingParams
from slipstream.worker.request_state import RequestState
from slipstream.worker.spec_decode.interface import PROPOSERS, DraftOutput, DraftRequest, SpeculatorContext
from slipstream.worker.spec_decode.planning import DraftMemory, Planning

NUM_DRAFTS = 5
MAX_INDEXED_TOKENS = 1024  # of a request's text, and of its reference, in one step: some 1.5 ms of the engine's thread
MAX_KEPT_NGRAMS = 1 << 24  # of all requests together, at some 100 bytes each: 5.6 million tokens in n-grams of 2 to 4


class NgramIndex:
    """The last position of each n-gram of `shortest` to `longest` tokens in a text that only grows.

    An n-gram's key is one number, 32 bits a token: the lower bits of the key of a longer one that ends alike. Each size
    has a dictionary of its own. end_key: of the last `longest` tokens.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        sizes = range(shortest, longest + 1)
        self._by_size: list[tuple[int, int, dict[int, int]]] = [(size, _mask(size), {}) for size in sizes]
        self._mask = _mask(longest)
        self.end_key = 0
        self.token_ids: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens. N-grams that end with the last token are not indexed yet: no token follows them."""
        start, key, mask, keys = len(self.token_ids), self.end_key, self._mask, list[int]()
        for token_id in token_ids:
            keys.append(key)  # of what stands before this token
            key = (key << 32 | token_id) & mask
        self.end_key = key
        self.token_ids += token_ids
        for size, own_mask, ends in self._by_size:
            end = max(start, size)  # the text begins with shorter ones
            for key in keys if end == start else keys[end - start :]:
                ends[key & own_mask] = end
                end += 1

    def find(self, key: int, num_tokens: int) -> int | None:
        """The place after the latest occurrence of the longest indexed end of a text of num_tokens. key: of its end."""
        found = None
        for size, mask, ends in self._by_size:
            longer = ends.get(key & mask) if size <= num_tokens else None
            if longer is None:
                break  # a longer n-gram that ends alike is not there either
            found = longer
        return found

    def continuation(self, key: int, num_known: int, num_tokens: int) -> list[int]:
        """The tokens after the last occurrence of what `find` finds; past the end of the text they repeat from
        there."""
        found = self.find(key, num_known)
        if found is None:
            return []
        tokens = self.token_ids[found : found + num_tokens]
        while tokens and len(tokens) < num_tokens:
            tokens += tokens[: num_tokens - len(tokens)]
        return tokens


def _mask(num_tokens: int) -> int:
    return (1 << 32 * num_tokens) - 1


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
        num_known, key = len(token_ids), text.end_key
        if len(text.token_ids) < num_known:  # not all is indexed yet
            key = 0
            for token_id in token_ids[-self._longest :]:
                key = key << 32 | token_id
        drafts: list[int] = []
        if request.params.reference_ids:
            reference = self._grown(self._references, request, request.params.reference_ids)
            drafts = reference.continuation(key, num_known, num_drafts)
        return drafts or text.continuation(key, num_known, num_drafts)

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
