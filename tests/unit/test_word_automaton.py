"""Many words in one automaton: the same ends as looking for each of them, whatever they share."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.bad_words import BadWords
from slipstream.core.finish import StopConditions
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.word_automaton import ROOT, WordAutomaton

token_ids = st.integers(0, 2)
words_ids = st.lists(st.lists(token_ids, min_size=1, max_size=5).map(tuple), min_size=1, max_size=6)


@settings(max_examples=400, deadline=None)
@given(words=words_ids, text=st.lists(token_ids, max_size=20))
def test_the_ends_are_those_of_a_plain_search(words: list[tuple[int, ...]], text: list[int]) -> None:
    automaton = WordAutomaton(words)
    state = ROOT
    for size, symbol in enumerate(text, 1):
        state = automaton.step(state, symbol)
        ending = {index for index, word in enumerate(words) if tuple(text[:size][-len(word) :]) == word}
        distinct = {words.index(words[index]) for index in ending}
        found = automaton.all_ends(state)
        assert set(found) == distinct
        assert [len(words[index]) for index in found] == sorted((len(words[index]) for index in found), reverse=True)
        assert automaton.ends[state] == (found[0] if found else -1)
        openings = {word[:length] for word in words for length in range(1, len(word))}
        longest = max((length for length in range(1, size + 1) if tuple(text[:size][-length:]) in openings), default=0)
        assert automaton.num_open[state] == longest


@settings(max_examples=200, deadline=None)
@given(words=words_ids, text=st.lists(token_ids, max_size=20), min_tokens=st.integers(0, 4), cut=st.integers(1, 3))
def test_stop_words_end_where_a_plain_search_ends(
    words: list[tuple[int, ...]], text: list[int], min_tokens: int, cut: int
) -> None:
    """The output alone counts, in pieces of any size: the prompt ends with what may begin a word."""
    params = SamplingParams(max_tokens=100, min_tokens=min_tokens, stop_words_ids=tuple(words), ignore_eos=True)
    request = Request([0, 1, 2, 0, 1], params)
    stop = StopConditions(request, 1000)
    ended = any(stop.extend(request, text[start : start + cut]) for start in range(0, len(text), cut))
    ends = [
        size
        for size in range(max(1, min_tokens), len(text) + 1)
        if any(tuple(text[:size][-len(word) :]) == word for word in words)
    ]
    assert ended == bool(ends)
    assert request.output_token_ids == text[: ends[0] if ends else len(text)]


@settings(max_examples=200, deadline=None)
@given(words=words_ids, text=st.lists(token_ids, max_size=20))
def test_bad_words_ban_what_would_complete_them(words: list[tuple[int, ...]], text: list[int]) -> None:
    bad = BadWords(words)
    state = ROOT
    for size in range(1, len(text) + 1):
        state = bad.step(state, text[size - 1])
        expected = {word[-1] for word in words if len(word) > 1 and tuple(text[:size][1 - len(word) :]) == word[:-1]}
        assert bad.banned(state) == sorted(expected), "each once: a ban counts twice for a token named twice"
