"""Many words in one automaton: the same ends as looking for each of them, whatever they share."""

from __future__ import annotations

import gc
import tracemalloc
from types import SimpleNamespace

import toy_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.bad_words import BadWords
from slipstream.core.config import StructuredOutputConfig
from slipstream.core.finish import StopConditions
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.setting_values import MAX_ENTRIES, MAX_ENTRIES_CHARS
from slipstream.core.word_automaton import ROOT, WordAutomaton
from slipstream.engine.input_processor import InputProcessor
from slipstream.tokenizer.tokenizer import TextTokenizer

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


def test_a_waiting_request_keeps_little_for_lists_as_long_as_they_may_be() -> None:
    """What it keeps, a queue of 1,024 requests may keep so often. A character is up to four tokens, and each bad word
    is encoded twice; siblings have parameters of their own if they report no prompt log-probabilities."""
    size = MAX_ENTRIES_CHARS // MAX_ENTRIES
    texts = tuple("".join(chr(0x10000 + 17 * (size * word + i)) for i in range(size)) for word in range(MAX_ENTRIES))
    words = tuple(tuple((word * 31 + i * i) % 256 for i in range(size)) for word in range(MAX_ENTRIES))
    params = SamplingParams(
        stop=texts, stop_words_ids=words, bad_words=texts, bad_words_ids=words, n=2, prompt_logprobs=0
    )
    spec = SimpleNamespace(vocab_size=1000, hidden_size=8, eos_token_ids=(0,))
    processor = InputProcessor(spec, TextTokenizer(toy_tokenizers.byte_level()), StructuredOutputConfig())  # type: ignore[arg-type]
    processor.prepare(Request([5], SamplingParams(bad_words=("first",))))  # what is made once for all
    gc.collect()
    tracemalloc.start()
    try:
        kept = processor.prepare(Request([5], params))
        gc.collect()
        num_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    num_ids = sum(map(len, kept[0].params.bad_words_ids))
    assert num_ids > 8 * MAX_ENTRIES_CHARS, "as many as a client can have"
    assert num_bytes < 6e6, f"{num_bytes} bytes for {num_ids} bad ids and {MAX_ENTRIES_CHARS} of each other list"
