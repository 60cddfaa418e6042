"""The guarded pipeline: safety of the prompt, the LLM's stream through the window, quality at the end.

Pure order of things; who checks, generates and sends is behind `Parts`, so that tests drive it without Triton.
One `Pipeline` serves one request, as a task of the event loop; cancelling the task ends everything.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from slipstream.encoders.window import HoldBackWindow, WindowSettings

OPEN, CLOSED = "open", "closed"
NO_QUALITY = -1.0


class EncoderFailure(Exception):
    """The safety or quality model is not there, answered with an error, or did not answer in time."""


@dataclass(frozen=True)
class Piece:
    """New text of the LLM (may be ""), and how many tokens it has; finish_reason is "" before the end."""

    text: str
    finish_reason: str = ""
    num_input_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True)
class Unsafe:
    categories: tuple[str, ...]
    score: float


@dataclass(frozen=True)
class Answer:
    """One response to the client. block_reason: "", prompt, answer or encoder_failure.

    num_input_tokens: of the prompt, 0 when the LLM has not seen it; num_output_tokens: made by the LLM since the
    response before, whether their text leaves now, later or never.
    """

    text: str = ""
    finish_reason: str = ""
    block_reason: str = ""
    unsafe: Unsafe = Unsafe((), 0.0)
    quality_score: float = NO_QUALITY
    quality_checks: str = "{}"
    is_checked: bool = True
    is_last: bool = False
    num_input_tokens: int = 0
    num_output_tokens: int = 0


class Parts(Protocol):
    """What the pipeline calls."""

    async def check(
        self, texts: Sequence[str]
    ) -> Unsafe | None: ...  # the worst; None: all safe. Raises EncoderFailure
    def pieces(self) -> AsyncGenerator[Piece, None]: ...  # Raises AnswerError; closing it stops the LLM
    async def judge(self, answer: str) -> tuple[float, str]: ...  # score, checks as JSON. Raises EncoderFailure
    def send(self, answer: Answer) -> None: ...


class Pipeline:
    def __init__(self, parts: Parts, window: WindowSettings, on_failure: str, is_streaming: bool) -> None:
        self._parts = parts
        self._window = HoldBackWindow(window)
        self._on_failure = on_failure
        self._is_streaming = is_streaming
        self._released: list[str] = []
        self._unsent: list[str] = []
        self._is_checked = True
        self._finish_reason = ""
        self._num_input_tokens = 0
        self._num_unsent_tokens = 0

    async def run(self, prompt: str) -> None:
        """Raises AnswerError; everything else ends in an answer."""
        blocked = await self._blocked([prompt], "prompt") or await self._generate()
        self._send(blocked or await self._whole())

    async def _generate(self) -> Answer | None:
        """Send the LLM's text as it passes; the answer that ends the request when some of it does not."""
        async with aclosing(self._parts.pieces()) as pieces:
            async for piece in pieces:
                self._window.push(piece.text)
                self._num_input_tokens = max(self._num_input_tokens, piece.num_input_tokens)
                self._num_unsent_tokens += piece.num_output_tokens
                self._finish_reason = piece.finish_reason or self._finish_reason
                blocked = await self._release(is_end=False)
                if blocked is not None:
                    return blocked
        return await self._release(is_end=True)

    async def _release(self, is_end: bool) -> Answer | None:
        """Check what is due and send what may leave; the answer that ends the request when a window fails."""
        windows = self._window.due(is_end)
        if not windows and not is_end:
            return None
        blocked = await self._blocked(windows, "answer")
        if blocked is not None:
            return blocked
        text = self._window.passed(is_end)
        self._released.append(text)
        self._unsent.append(text)
        if text and self._is_streaming and not is_end:
            self._send(Answer(text=self._take_unsent(), is_checked=self._is_checked))
        return None

    async def _blocked(self, texts: Sequence[str], reason: str) -> Answer | None:
        """The answer that ends the request, or None when these texts may pass."""
        try:
            unsafe = await self._parts.check(texts) if texts else None
        except EncoderFailure:
            if self._on_failure == OPEN:
                self._is_checked = False
                return None
            return Answer(finish_reason="blocked", block_reason="encoder_failure", is_checked=False, is_last=True)
        if unsafe is None:
            return None
        return Answer(
            finish_reason="blocked", block_reason=reason, unsafe=unsafe, is_checked=self._is_checked, is_last=True
        )

    async def _whole(self) -> Answer:
        """The last answer of a text that passed, with its mark."""
        score, checks = NO_QUALITY, "{}"
        with suppress(EncoderFailure):  # an answer is not worse for want of a mark: quality_score stays -1
            score, checks = await self._parts.judge("".join(self._released))
        return Answer(
            text=self._take_unsent(),
            finish_reason=self._finish_reason,
            quality_score=score,
            quality_checks=checks,
            is_checked=self._is_checked,
            is_last=True,
        )

    def _send(self, answer: Answer) -> None:
        num_output, self._num_unsent_tokens = self._num_unsent_tokens, 0
        self._parts.send(replace(answer, num_input_tokens=self._num_input_tokens, num_output_tokens=num_output))

    def _take_unsent(self) -> str:
        text = "".join(self._unsent)
        self._unsent.clear()
        return text
