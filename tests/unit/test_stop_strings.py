"""Stop strings: the same outcome however the text is cut, and nothing out that might have to be taken back."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.word_automaton import WordAutomaton
from slipstream.tokenizer.stop_strings import StopMatcher


def make(stops: list[str], include: bool = False) -> StopMatcher:
    return StopMatcher(stops, WordAutomaton.of_texts(stops), include)


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = make(stops, include)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.flush(), matcher.matched


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character; at each the longest stop string that ends there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


small = st.text(alphabet="ab\n", max_size=12)


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="ab\n", max_size=4), max_size=8),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_the_cut_does_not_matter(pieces: list[str], stops: list[str], include: bool) -> None:
    assert run(pieces, stops, include) == reference("".join(pieces), stops, include)


@settings(max_examples=300, deadline=None)
@given(text=small, stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_what_could_become_a_stop_is_held(text: str, stops: list[str]) -> None:
    matcher = make(stops)
    given_out = ""
    for char in text:
        given_out += matcher.push(char)
        if matcher.matched is not None:
            return
        seen = text[: len(given_out) + matcher.num_held]
        held = seen[len(given_out) :]
        openings = {stop[:size] for stop in stops for size in range(1, len(stop))}
        longest = max((size for size in range(len(seen) + 1) if seen[len(seen) - size :] in openings), default=0)
        assert len(held) == longest


def test_a_false_start_is_given_out() -> None:
    matcher = make(["\nUser:"])
    assert matcher.push("Hello\nUs") == "Hello"
    assert matcher.num_held == 3
    assert matcher.push("ual") == "\nUsual"
    assert matcher.num_held == 0
    assert matcher.push("\nUser: hi") == ""
    assert matcher.matched == "\nUser:"
    assert matcher.push("more") == "" and matcher.flush() == ""


def test_first_complete_wins_and_the_longer_of_two() -> None:
    assert run(["xabcd"], ["abcd", "bc"]) == ("xa", "bc")
    assert run(["xabc"], ["bc", "abc"]) == ("x", "abc")
    assert run(["one END two"], ["END"], include=True) == ("one END", "END")
