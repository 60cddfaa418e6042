"""The sliding window: nothing leaves unchecked, safe text leaves whole, unsafe text never, however it is cut."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.encoders.window import HoldBackWindow, WindowSettings

BAD = "FORBIDDEN PHRASE"
SETTINGS = WindowSettings(size=60, hold_back=20, stride=8)


def stream(pieces: list[str], chosen: WindowSettings, bad: str = BAD) -> tuple[str, bool, list[str]]:
    """(what left, whether it was blocked, every window) of a stream whose check is `bad in window`."""
    window, left, seen = HoldBackWindow(chosen), "", []
    for number in range(len(pieces) + 1):
        is_end = number == len(pieces)
        if not is_end:
            window.push(pieces[number])
        windows = window.due(is_end)
        seen += windows
        if any(bad in text for text in windows):
            return left, True, seen
        if windows or is_end:
            left += window.passed(is_end)
    return left, False, seen


def cut(text: str, seed: int) -> list[str]:
    rng, pieces = random.Random(seed), []
    while text:
        size = rng.choice((1, 2, 3, 7, 30, 200))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@given(st.text(max_size=400), st.integers(0, 1000), st.integers(0, 50), st.integers(1, 30), st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_safe_text_leaves_whole(text: str, seed: int, hold_back: int, stride: int, extra: int) -> None:
    chosen = WindowSettings(hold_back + stride + extra, hold_back, stride)
    assert stream(cut(text, seed), chosen, bad="\0never\0")[:2] == (text, False)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 10_000))
@settings(max_examples=200, deadline=None)
def test_a_phrase_no_longer_than_the_hold_back_never_leaves(before: int, after: int, seed: int) -> None:
    """Not one character of it, wherever the borders of pieces and windows fall."""
    text = "a" * before + BAD + "b" * after
    left, is_blocked, _ = stream(cut(text, seed), SETTINGS)
    assert is_blocked
    assert text.startswith(left) and len(left) <= before


@given(st.text(alphabet="xyz ", min_size=1, max_size=500), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_what_left_was_checked_with_what_follows_it(text: str, seed: int) -> None:
    """After every step each released character has been in a window that goes on for hold_back characters."""
    window, position = HoldBackWindow(SETTINGS), 0
    for piece in cut(text, seed):
        window.push(piece)
        if window.due():
            position += len(window.passed())
            assert position <= max(0, window.num_received - SETTINGS.hold_back)


def test_windows_are_of_the_size_and_as_many_as_needed() -> None:
    _, _, windows = stream(["x" * 1000], SETTINGS)
    assert max(map(len, windows)) == SETTINGS.size
    assert len(windows) == 1 + -(-(1000 - SETTINGS.size) // (SETTINGS.size - SETTINGS.hold_back))
    _, _, windows = stream(["x"] * 80, SETTINGS)
    assert len(windows) == 10, "one check per stride"
