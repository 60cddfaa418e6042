"""Prompt lookup over long texts: indexed a piece per step, so that no step stands still for one request's reference."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
from slipstream.core.config import EngineConfig, SpeculationConfig
from slipstream.core.draft_methods import NgramOptions
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.step_inputs import new_request
from slipstream.worker.interface import DraftBudget
from slipstream.worker.request_state import RequestState
from slipstream.worker.spec_decode import ngram
from slipstream.worker.spec_decode.interface import DraftRequest
from slipstream.worker.spec_decode.ngram import MAX_INDEXED_TOKENS, NgramIndex, NgramProposer


def test_a_long_text_and_a_long_reference_are_indexed_piece_by_piece(monkeypatch) -> None:
    prompt = list(range(10, 10 + 2 * MAX_INDEXED_TOKENS + 50))
    reference = tuple(range(50_000, 50_000 + MAX_INDEXED_TOKENS + 9))
    request = RequestState(new_request(Request(prompt, SamplingParams(reference_ids=reference))))
    pieces: list[int] = []
    extend = NgramIndex.extend

    def counting(index: NgramIndex, token_ids) -> None:
        pieces.append(len(token_ids))
        extend(index, token_ids)

    monkeypatch.setattr(ngram.NgramIndex, "extend", counting)
    proposer = _proposer()
    wanted = _draft_request(request)
    for _ in range(4):
        proposer.propose([wanted])
    assert max(pieces) == MAX_INDEXED_TOKENS and sum(pieces) == len(prompt) + len(reference)

    request.token_ids += reference[-9:-7]
    [drafts] = proposer.propose([wanted])
    assert drafts.token_ids == list(reference[-7:-4]), "the last piece of the reference is found"
    request.token_ids += prompt[2048:2050]
    [drafts] = proposer.propose([wanted])
    assert drafts.token_ids == prompt[2050:2053], "and that of the prompt"


@pytest.mark.parametrize("longest", [4, 2])
def test_the_indices_of_all_requests_have_a_bound(monkeypatch: pytest.MonkeyPatch, longest: int) -> None:
    """Beyond it texts are not indexed, and are again once others have ended; a reference takes no KV blocks. A token
    takes as much memory whatever the sizes of n-grams are."""
    monkeypatch.setattr(ngram, "MAX_KEPT_TOKENS", 1000)
    config = EngineConfig(speculation=SpeculationConfig(options={"ngram": NgramOptions(ngram_max=longest)}))
    proposer = NgramProposer(SimpleNamespace(config=config))  # type: ignore[arg-type]
    assert proposer._longest == longest
    params = SamplingParams(reference_ids=tuple(range(5000, 5600)))
    prompts = [list(range(start, start + 300)) for start in (10, 1010)]
    first, second = (RequestState(new_request(Request(prompt, params))) for prompt in prompts)

    def drafted(request: RequestState, ending: list[int]) -> list[int]:
        request.token_ids += ending
        [drafts] = proposer.propose([_draft_request(request)])
        return drafts.token_ids

    assert drafted(first, [5100, 5101]) == [5102, 5103, 5104]
    assert drafted(second, [5100, 5101]) == [], "902 of 1,000 tokens are the first's, and 98 of the second's text"
    assert drafted(second, [1050, 1051]) == [1052, 1053, 1054], "what is indexed is found"
    indices = [*proposer._texts.values(), *proposer._references.values()]
    assert sum(len(index.token_ids) for index in indices) == 1000
    proposer.forget([first.sequence_id, 77])
    assert drafted(second, [5100, 5101]) == [5102, 5103, 5104]
    proposer.forget([second.sequence_id])
    assert proposer._num_tokens == 0


def _searched(text: list[int], shortest: int, longest: int) -> int | None:
    """The place after the latest occurrence of the longest end of a text within it, by looking everywhere."""
    for size in range(min(longest, len(text)), shortest - 1, -1):
        found = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
        if found:
            return found[-1]
    return None


@pytest.mark.parametrize("sizes", [(2, 4), (1, 4), (1, 1), (1, 2), (3, 3), (3, 6)])
def test_an_index_that_grows_in_pieces_finds_what_a_search_finds(sizes: tuple[int, int]) -> None:
    """Token 0 too, which in a key is what stands before the text begins."""
    numbers, (shortest, longest) = Random(3), sizes
    for _ in range(200):
        index, text = NgramIndex(shortest, longest), list[int]()
        for _ in range(8):
            piece = [numbers.randrange(3) for _ in range(numbers.randrange(5))]
            text += piece
            index.extend(piece)
            assert not text or index.end_key == index.key_of(text[-longest:])
            assert index.find(text[-longest:], index.end_key) == (_searched(text, shortest, longest) or 0), text
        assert index.token_ids == text


def test_a_longer_ngram_is_searched_for_at_so_many_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond them the last place behind the shortest is taken: a look-up does not take as long as the text is."""
    monkeypatch.setattr(ngram, "MAX_LOOKS", 5)
    index = NgramIndex(2, 4)
    index.extend([10, 11, 1, 2, 20, *[9, 8, 1, 2, 30] * 4])
    key = index.key_of([1, 2])
    assert index.find([10, 11, 1, 2], key) == 4, "the fifth place from the end"
    index.extend([9, 8, 1, 2, 40])
    assert index.find([10, 11, 1, 2], key) == index.token_ids.index(40), "the sixth: two tokens are enough"
    assert index.find([7, 8, 1, 2], key) == index.token_ids.index(40)


def test_a_text_that_is_not_indexed_yet_is_looked_up_by_its_own_end(monkeypatch) -> None:
    monkeypatch.setattr(ngram, "MAX_INDEXED_TOKENS", 8)
    request = RequestState(new_request(Request([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 1, 2], SamplingParams())))
    proposer = _proposer()
    [drafts] = proposer.propose([_draft_request(request)])
    assert drafts.token_ids == [3, 4, 5]


def _proposer() -> NgramProposer:
    return NgramProposer(SimpleNamespace(config=EngineConfig()))  # type: ignore[arg-type]


def _draft_request(request: RequestState) -> DraftRequest:
    """One that may have three drafts."""
    return DraftRequest(request, DraftBudget(request.sequence_id, "ngram", 3, depth=3, index=0, has_scratch=True))


def _state(text: list[int], **params: object) -> RequestState:
    return RequestState(new_request(Request(text, SamplingParams(**params))))  # type: ignore[arg-type]


def test_a_text_that_repeats_a_passage_is_drafted_from_there_to_its_end() -> None:
    """Also where an n-gram of the passage is in it twice, and goes on in two ways; only the passage says in which."""
    passage = [50, 51, 1, 2, 3, 4, 60, 61, 1, 2, 3, 4, 70, 71]
    proposer, request = _proposer(), _state([*passage, 9, 9, 50, 51])
    assert proposer.chains([request], 4) == [[1, 2, 3, 4]]
    request.token_ids += [1, 2, 3, 4]
    assert proposer.chains([request], 2) == [[60, 61]], "the last place behind 1 2 3 4 is another"
    request.token_ids += [60]
    assert proposer.chains([request], 3) == [[61, 1, 2]], "whatever of the drafts was taken"
    request.token_ids += [61, 1, 2, 3, 4, 8, 70]
    assert proposer.chains([request], 3) == [[]], (
        "it has gone on otherwise, with tokens that were never behind each other"
    )
    request.token_ids += [71]
    assert proposer.chains([request], 2) == [[9, 9]]


def test_what_repeats_is_indexed_when_it_has_gone_on_otherwise() -> None:
    proposer, request = _proposer(), _state([*range(10, 40), 10, 11])
    assert proposer.chains([request], 5) == [[12, 13, 14, 15, 16]]
    for first in range(12, 30, 3):
        request.token_ids += range(first, first + 3)
        assert proposer.chains([request], 2) == [[first + 3, first + 4]]
    assert len(proposer._texts[request.sequence_id].token_ids) == 32 < request.num_tokens
    request.token_ids += [99, 10, 11]
    assert proposer.chains([request], 2) == [[12, 13]]
    assert proposer._texts[request.sequence_id].token_ids == request.token_ids
    request.token_ids += [12, 13]
    again = RequestState(new_request(Request(request.token_ids[:], SamplingParams())))  # as after a preemption
    again.sequence_id = request.sequence_id
    assert proposer.chains([again], 2) == [[14, 15]]
    proposer.forget([request.sequence_id])
    assert not proposer._sources


def test_a_text_repeats_its_own_end_as_often_as_drafts_are_wanted() -> None:
    proposer, request = _proposer(), _state([5, 6, 7, 5, 6])
    assert proposer.chains([request], 7) == [[7, 5, 6, 7, 5, 6, 7]]
    request.token_ids += [7, 5, 6, 7]
    assert proposer.chains([request], 4) == [[5, 6, 7, 5]]


def test_a_reference_is_followed_to_its_end() -> None:
    proposer, request = _proposer(), _state([1, 2, 30, 31, 1, 2], reference_ids=(1, 2, 3, 4, 5))
    assert proposer.chains([request], 2) == [[3, 4]]
    request.token_ids += [3, 4]
    assert proposer.chains([request], 1) == [[5]]
    request.token_ids += [5]
    assert proposer.chains([request], 2) == [[]], "it has ended, and nothing else begins so"
    request.token_ids += [1, 2]
    assert proposer.chains([request], 1) == [[3]]


def test_requests_that_begin_to_draft_together_are_indexed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_INDEXED_IN_STEP", 70)
    proposer, texts = _proposer(), [[*range(start, start + 40), start, start + 1] for start in (10, 110, 210)]
    requests = [_state(text) for text in texts]
    found = [proposer.chains(requests, 2) for _ in range(3)]
    assert found[0] == [[12, 13], [112, 113], []] and found[1] == found[2] == [[12, 13], [112, 113], [212, 213]]
    assert sum(len(index.token_ids) for index in proposer._texts.values()) <= 3 * 42


class _ReadText(list[int]):
    """Counts the tokens that are copied out of it."""

    num_copied = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        found = super().__getitem__(key)
        self.num_copied += len(found) if isinstance(key, slice) else 0
        return found


@pytest.mark.parametrize("reference", [(), (1, 2, 3, 4)], ids=["own text", "reference"])
def test_a_text_that_never_repeats_again_is_not_compared_with_its_last_source(reference: tuple[int, ...]) -> None:
    """All that it had got since was compared in each step, so that a step took as long as the text was."""
    proposer, request = _proposer(), _state([1, 2, 3, 1, 2], reference_ids=reference)
    request.token_ids = text = _ReadText(request.token_ids)
    assert proposer.chains([request], 3) == [[3, 4, 3] if reference else [3, 1, 2]]
    for token_id in range(1000, 3000):
        text.append(token_id)
        assert proposer.chains([request], 3) == [[]]
    assert text.num_copied < 10 * len(text)
