"""build/needle.py: what a cell hides where, how answers are scored and compared, the table and the picture."""

from __future__ import annotations

import io
import json
import sys
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build"))
import needle
from needle_grid import ANSWER_TOKENS, Cell, Grid

HAYSTACK = "".join(f"Line {index} of this text says nothing. " for index in range(50))


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_model)


def test_a_cell_has_its_length_and_its_needle_at_its_depth(tokenizer: PreTrainedTokenizerBase) -> None:
    cells = list(Grid(HAYSTACK, tokenizer, is_chat=False).cells([256, 2048], [0, 50, 100]))
    assert [(cell.length, cell.depth) for cell in cells] == [(n, d) for n in (256, 2048) for d in (0, 50, 100)]
    for cell in cells:
        num_tokens = len(tokenizer(cell.prompt)["input_ids"])
        assert cell.length - ANSWER_TOKENS - 40 < num_tokens <= cell.length - ANSWER_TOKENS
        assert cell.prompt.count(cell.number) == 1
        place = cell.prompt.index(cell.number) / len(cell.prompt)
        assert abs(place - cell.depth / 100) < 0.35 if cell.length == 256 else abs(place - cell.depth / 100) < 0.06
        assert cell.score(f"It is {cell.number}.") == 1 and cell.score("I do not know: 123") == 0
        assert cell.score(f"It is {int(cell.number):,}.") == 1 and cell.score(f"{cell.number}0, 1{cell.number}") == 0
    assert len({cell.number for cell in cells}) == 6


@pytest.mark.parametrize("haystack", ["It begins. " + "and goes on; " * 500, "\u4ed6\u8bf4\u3002" * 700])
def test_depths_hold_in_texts_without_full_stops(haystack: str, tokenizer: PreTrainedTokenizerBase) -> None:
    for cell in Grid(haystack, tokenizer, is_chat=False).cells([2048], [0, 30, 70, 100]):
        assert abs(cell.prompt.index(cell.number) / len(cell.prompt) - cell.depth / 100) < 0.11


def test_cells_follow_from_the_seed(tokenizer: PreTrainedTokenizerBase) -> None:
    def cells(seed: int) -> list[str]:
        return [cell.prompt for cell in Grid(HAYSTACK, tokenizer, is_chat=False, seed=seed).cells([256], [0, 50])]

    assert cells(1) == cells(1) != cells(2)


def test_what_cannot_be_asked_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"length 64: accepted: at least \d+"):
        list(Grid(HAYSTACK, tokenizer, is_chat=False).cells([64], [0]))
    with pytest.raises(ValueError, match="haystack is empty"):
        Grid("", tokenizer, is_chat=False)
    assert needle.numbers("8k,100") == [8192, 100]
    assert needle.main(["--tokenizer", "/nowhere", "--openai", "http://127.0.0.1:1/v1", "--lengths", "256"]) == 2


def test_what_comes_back_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """Null where reasoning took every token, and the server's own words where it refuses."""
    asked: list[bytes] = []

    def reply(request: urllib.request.Request, timeout: float) -> io.BytesIO:
        assert isinstance(request.data, bytes)
        asked.append(request.data)
        return io.BytesIO(json.dumps({"choices": [{"message": {"content": None}}]}).encode())

    def refuse(request: urllib.request.Request, timeout: float) -> io.BytesIO:
        raise urllib.error.HTTPError(request.full_url, 400, "Bad Request", Message(), io.BytesIO(b"at most 100"))

    sampling = {"max_tokens": 2048, "temperature": 0.0}
    answer = needle.over_openai("http://here/v1", "llm", sampling, is_chat=True, key="none")
    cell = Cell(256, 0, "123456", "message", "prompt")
    monkeypatch.setattr(urllib.request, "urlopen", reply)
    assert answer(cell) == "" and json.loads(asked[0])["max_tokens"] == 2048
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(ValueError, match="400: Bad Request: at most 100"):
        answer(cell)


@pytest.mark.parametrize(("option", "asked"), [([], {"add_special_tokens": False}), (["--no-chat"], {})])
def test_a_template_s_special_tokens_are_not_added_again(
    option: list[str], asked: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, object]] = []
    monkeypatch.setattr(needle, "over_grpc", lambda url, model, sampling: sent.append(sampling))
    needle.answer_of(needle.parse(["--tokenizer", "model", *option]))
    assert sent == [{"max_tokens": ANSWER_TOKENS, "temperature": 0.0, **asked}]


def test_only_runs_over_the_same_cells_are_compared(tmp_path: Path) -> None:
    earlier, about = tmp_path / "needle.json", {"seed": 0, "haystack": "abc"}
    earlier.write_text(json.dumps({**about, "results": results(1)}))
    assert needle.read_earlier(earlier, about) == results(1) and needle.read_earlier(None, about) == []
    for other in ({**about, "seed": 1}, {**about, "haystack": "abd"}):
        with pytest.raises(ValueError, match=f"--same-as {earlier}: .*; accepted: "):
            needle.read_earlier(earlier, other)
    earlier.write_text("{}")
    with pytest.raises(ValueError, match=r"accepted: needle\.json of an earlier run"):
        needle.read_earlier(earlier, about)
    assert needle.percents("0,100") == [0, 100]
    for wrong in ("101", "-1"):
        with pytest.raises(ValueError, match=wrong):
            needle.percents(wrong)


def test_what_was_found_is_kept_if_a_later_cell_fails(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["text"])
    monkeypatch.setattr(needle, "answer_of", lambda args: lambda cell: next(answers))
    asked = ["--tokenizer", str(demo_model), "--no-chat", "--lengths", "256", "--depths", "0,50"]
    with pytest.raises((StopIteration, RuntimeError)):
        needle.main([*asked, "--output", str(tmp_path)])
    assert len(json.loads((tmp_path / "needle.json").read_text())["results"]) == 1


def results(*scores: int) -> list[needle.Result]:
    return [
        {"length": 256, "depth": 50 * index, "number": "123456", "answer": "ab"[score], "score": score}
        for index, score in enumerate(scores)
    ]


def test_table_and_picture(tmp_path: Path) -> None:
    assert needle.table(results(1, 0, 1)).splitlines()[2] == "| 256 | 1 | 0 | 1 | 2 of 3 |"
    needle.draw(results(1, 0, 1), "a model", tmp_path / "needle.png")
    assert (tmp_path / "needle.png").read_bytes().startswith(b"\x89PNG")


def test_other_texts_are_named() -> None:
    assert needle.differing(results(1, 0), results(1, 0)) == needle.differing(results(1, 0), []) == []
    assert needle.differing(results(1, 0), results(1, 1)) == [(256, 50)]
    assert needle.differing([{**results(1)[0], "same_again": False}], []) == [(256, 0)]
