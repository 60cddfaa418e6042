"""The guarded pipeline without Triton: its order, its two policies, cancellation, and what a client may see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import pytest
from slipstream.core.answer_faults import AnswerError
from slipstream.encoders.guarded import Answer, EncoderFailure, Piece, Pipeline, Unsafe
from slipstream.encoders.window import WindowSettings

WINDOW = WindowSettings(size=40, hold_back=10, stride=5)
UNSAFE = Unsafe(("violence",), 0.9)


@dataclass
class FakeParts:
    """An LLM of given pieces; texts with BAD are unsafe; a number of checks after which the encoder fails."""

    texts: list[str] = field(default_factory=lambda: ["one two three ", "four five six ", "seven eight nine"])
    checks_until_failure: int = 1000
    leaves_at_check: int = 1000
    has_quality: bool = True
    llm_fails: bool = False
    answers: list[Answer] = field(default_factory=list)
    num_pieces: int = 0
    is_open: bool = False  # the LLM's stream
    was_stopped: bool = False

    async def check(self, texts: Sequence[str]) -> Unsafe | None:
        self.leaves_at_check -= 1
        if self.leaves_at_check < 0:
            raise asyncio.CancelledError
        self.checks_until_failure -= 1
        if self.checks_until_failure < 0:
            raise EncoderFailure("no encoder")
        return UNSAFE if any("BAD" in text for text in texts) else None

    async def check_prompt(self, prompt: str) -> Unsafe | None:
        return await self.check([prompt])

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        self.is_open = self.was_stopped = True
        try:
            for text in self.texts:
                self.num_pieces += 1
                yield Piece(text, num_input_tokens=4, num_output_tokens=len(text.split()))
            if self.llm_fails:
                raise AnswerError("out of memory")
            yield Piece("", "stop", num_output_tokens=1)
            self.was_stopped = False
        finally:
            self.is_open = False

    async def judge(self, answer: str) -> tuple[float, str]:
        if not self.has_quality:
            raise EncoderFailure("no quality")
        return 0.5, json.dumps({"length": len(answer)})

    def send(self, answer: Answer) -> None:
        assert not (answer.is_last and self.is_open), "the LLM goes on after the last answer"
        self.answers.append(answer)

    @property
    def text(self) -> str:
        return "".join(answer.text for answer in self.answers)


def run(parts: FakeParts, on_failure: str = "closed", is_streaming: bool = True, prompt: str = "hello") -> FakeParts:
    asyncio.run(Pipeline(parts, WINDOW, on_failure, is_streaming).run(prompt))
    assert not parts.is_open
    return parts


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_safe_answer_arrives_whole_with_its_quality(is_streaming: bool) -> None:
    parts = run(FakeParts(), is_streaming=is_streaming)
    assert parts.text == "one two three four five six seven eight nine"
    last = parts.answers[-1]
    assert (last.is_last, last.finish_reason, last.quality_score, last.block_reason) == (True, "stop", 0.5, "")
    assert (len(parts.answers) > 1) == is_streaming
    assert last.quality_checks == '{"length": 44}'


def test_an_unsafe_prompt_never_reaches_the_llm() -> None:
    parts = run(FakeParts(), prompt="something BAD")
    assert parts.num_pieces == 0
    assert [(a.block_reason, a.unsafe, a.text) for a in parts.answers] == [("prompt", UNSAFE, "")]


@pytest.mark.parametrize("is_streaming", [True, False])
def test_an_unsafe_answer_ends_with_a_reason_and_stops_the_llm(is_streaming: bool) -> None:
    parts = run(FakeParts(["fine so far, fine so far ", "then B", "A", "D things", " more"]), is_streaming=is_streaming)
    assert parts.was_stopped
    assert parts.answers[-1].block_reason == "answer" and parts.answers[-1].finish_reason == "blocked"
    assert "fine so far, fine so far then ".startswith(parts.text)
    assert bool(parts.text) == is_streaming


def test_unsafe_text_at_the_very_end_is_seen() -> None:
    parts = run(FakeParts(["a long beginning of the answer ", "BAD"]))
    assert parts.answers[-1].block_reason == "answer" and "B" not in parts.text


@pytest.mark.parametrize("works_for", [0, 1, 2])
def test_encoder_failure_closed(works_for: int) -> None:
    parts = run(FakeParts(checks_until_failure=works_for))
    last = parts.answers[-1]
    assert (last.block_reason, last.is_checked, last.is_last) == ("encoder_failure", False, True)
    assert parts.was_stopped == (works_for > 0)
    assert len(parts.text) <= WINDOW.size


@pytest.mark.parametrize("works_for", [0, 1, 2])
def test_encoder_failure_open(works_for: int) -> None:
    parts = run(FakeParts(checks_until_failure=works_for), on_failure="open")
    assert parts.text == "one two three four five six seven eight nine"
    assert parts.answers[-1].block_reason == "" and not parts.answers[-1].is_checked


def test_no_quality_is_no_failure() -> None:
    last = run(FakeParts(has_quality=False)).answers[-1]
    assert (last.quality_score, last.block_reason, last.finish_reason) == (-1.0, "", "stop")


def test_an_error_of_the_llm_is_the_callers() -> None:
    parts = FakeParts(llm_fails=True)
    with pytest.raises(AnswerError, match="out of memory"):
        run(parts)
    assert not any(answer.is_last for answer in parts.answers)


@pytest.mark.parametrize("is_streaming", [True, False])
def test_every_token_is_counted_once(is_streaming: bool) -> None:
    parts = run(FakeParts(), is_streaming=is_streaming)
    assert sum(answer.num_output_tokens for answer in parts.answers) == 10
    assert {answer.num_input_tokens for answer in parts.answers} == {4}
    blocked = run(FakeParts(["fine so far, fine so far ", "then BAD things"]), is_streaming=is_streaming)
    assert sum(answer.num_output_tokens for answer in blocked.answers) == 9, "withheld ones too"
    unseen = run(FakeParts(), prompt="BAD").answers[-1]
    assert (unseen.num_input_tokens, unseen.num_output_tokens) == (0, 0)


@pytest.mark.parametrize("checks", [0, 1, 2])
def test_one_who_leaves_is_told_nothing_and_stops_the_llm(checks: int) -> None:
    parts = FakeParts(leaves_at_check=checks)
    with pytest.raises(asyncio.CancelledError):
        run(parts)
    assert parts.was_stopped == (checks > 0) and not parts.is_open
    assert not any(answer.is_last for answer in parts.answers)
