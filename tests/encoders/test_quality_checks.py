"""The checks of the quality model that need no encoder."""

from __future__ import annotations

import time

import pytest
from slipstream.encoders.quality import form, language, repetition


def test_repetition() -> None:
    assert repetition("short") == repetition("") == 1.0
    assert repetition("one two three four five six seven eight") == 1.0
    assert repetition("say it again " * 30) < 0.1


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ("What is the capital of France", "It is Paris and that is the answer to this", 1.0),
        ("Was ist die Hauptstadt und wo ist das", "It is Paris and that is the answer to this", 0.0),
        ("What is the capital of France", "Столица Франции", 0.0),
        ("What is the capital of France", "42", 1.0),
        ("日本の首都は", "東京です", 1.0),
    ],
)
def test_language(prompt: str, answer: str, expected: float) -> None:
    assert language(prompt, answer) == expected


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ("Hi", "Hello", 1.0),
        ("Hi", "  ", 0.0),
        ("Hi", "broken \ufffd", 0.5),
        ("Hi", "```python\nprint(1)", 0.5),
        ("Answer in JSON", '{"a": 1}', 1.0),
        ("Answer in JSON", 'Sure:\n```json\n{"a": 1}\n```', 1.0),
        ("Answer in JSON", "a is 1", 2 / 3),
    ],
)
def test_form(prompt: str, answer: str, expected: float) -> None:
    assert form(prompt, answer) == pytest.approx(expected)


def test_json_that_is_nested_too_deeply_is_none() -> None:
    """An exception would be the answer to all requests of the batch."""
    assert form("Return valid JSON.", "[" * 100_000) == form("Return valid JSON.", "{") == 2 / 3


def test_a_fence_without_end_takes_no_square_of_its_length() -> None:
    start = time.process_time()
    assert form("Return valid JSON.", "```" + " " * 200_000) == 1 / 3
    assert time.process_time() - start < 1
    assert form("Return valid JSON.", "Sure:\n``` \n {} ```") == 1.0
