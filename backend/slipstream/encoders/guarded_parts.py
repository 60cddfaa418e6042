"""Implements the parts of a guarded pipeline by calling other models. Event loop thread."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, nullcontext
from typing import Any, TypeVar

import numpy as np

from slipstream.core.answer_faults import AnswerError
from slipstream.core.errors import CapacityError
from slipstream.encoders.check_calls import in_calls
from slipstream.encoders.guard_settings import GuardSettings
from slipstream.encoders.guarded import Answer, EncoderFailure, Piece, Unsafe
from slipstream.encoders.guarded_request import GuardedRequest
from slipstream.encoders.text_tensors import strings
from slipstream.encoders.timed_calls import CallTimeout, TimedCalls, forget_failure, happens
from slipstream.encoders.triton_calls import Call, Tensors, TritonCalls

_log = logging.getLogger(__name__)
_OF_LLM = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")
_REFUSES_TO_STREAM = "stream: got True"
_RETRY_S = 10.0  # max time between a call that timed out and the next one

Result = TypeVar("Result")


class Models:
    """The models that `guarded` calls, shared by all its requests. Construct it on the event loop."""

    def __init__(self, settings: GuardSettings) -> None:
        self.settings = settings
        self.calls = TritonCalls(settings.triton_url)
        # separate, so that a hanging model delays only its own calls
        names = (settings.safety, *settings.prompt_checks)
        self._checks = {name: TimedCalls(settings.encoder_timeout_s) for name in names}
        self._turns = {name: asyncio.Lock() for name in names}  # of long texts: their parts come one at a time
        self._quality = TimedCalls(settings.encoder_timeout_s)

    async def check(self, texts: Sequence[str]) -> Unsafe | None:
        """The worst unsafe verdict, or None.  Raises EncoderFailure, and AnswerError if the server shuts down."""
        return await self._check_by(self.settings.safety, texts)

    async def check_prompt(self, prompt: str) -> Unsafe | None:
        """The worst verdict of `safety` and the `prompt_checks`; one that flags decides although another failed."""
        found = await asyncio.gather(*(self._check_by(name, [prompt]) for name in self._checks), return_exceptions=True)
        flagged = [one for one in found if isinstance(one, Unsafe)]
        failed = next((one for one in found if isinstance(one, BaseException)), None)
        if failed is not None and (not flagged or not isinstance(failed, EncoderFailure)):
            raise failed
        return max(flagged, key=lambda unsafe: unsafe.score, default=None)

    async def _check_by(self, model: str, texts: Sequence[str]) -> Unsafe | None:
        calls = list(in_calls(texts))
        worst: Unsafe | None = None
        for rows in calls:
            async with self._turns[model] if len(calls) > 1 else nullcontext():
                unsafe = await self._in_time(model, self._checks[model], self._check(model, rows))
            worst = unsafe if worst is None or (unsafe is not None and unsafe.score > worst.score) else worst
        return worst

    async def _check(self, model: str, texts: Sequence[str]) -> Unsafe | None:
        worst: Unsafe | None = None
        found = await self._infer(
            model, {"text": strings([[text] for text in texts])}, ("flagged", "categories", "scores")
        )
        for row in np.flatnonzero(found["flagged"].reshape(-1)):
            names = tuple(name.decode() for name in found["categories"][row] if name)
            unsafe = Unsafe(names, float(found["scores"][row].max()))
            worst = unsafe if worst is None or unsafe.score > worst.score else worst
        return worst

    async def judge(self, prompt: str, answer: str) -> tuple[float, str]:
        """Raises EncoderFailure, and AnswerError."""
        return await self._in_time(self.settings.quality, self._quality, self._judge(prompt, answer))

    async def _judge(self, prompt: str, answer: str) -> tuple[float, str]:
        inputs = {"prompt": strings([[prompt]]), "answer": strings([[answer]])}
        found = await self._infer(self.settings.quality, inputs, ("score", "checks"))
        return float(found["score"].reshape(-1)[0]), found["checks"].reshape(-1)[0].decode()

    async def _infer(self, model: str, inputs: Tensors, outputs: tuple[str, ...]) -> Tensors:
        # longer than any caller waits: while a call that timed out still runs, no other is made
        return await self.calls.infer(Call(model, inputs, outputs), self.settings.encoder_timeout_s + _RETRY_S)

    async def _in_time(self, model: str, calls: TimedCalls, call: Coroutine[Any, Any, Result]) -> Result:
        try:
            return await calls.run(call)
        except (AnswerError, CallTimeout) as failure:
            _log.warning("%s: %s", model, failure)
            await self.calls.check_live()  # a shutdown of the server is not an encoder failure
            raise EncoderFailure(str(failure)) from failure


class GuardedParts:
    """The `Parts` of one request's pipeline."""

    def __init__(self, models: Models, request: GuardedRequest, send: Callable[[Answer], None]) -> None:
        self._models, self._request, self._send = models, request, send

    async def check(self, texts: Sequence[str]) -> Unsafe | None:
        return await self._models.check(texts)

    async def check_prompt(self, prompt: str) -> Unsafe | None:
        return await self._models.check_prompt(prompt)

    async def judge(self, answer: str) -> tuple[float, str]:
        return await self._models.judge(self._request.prompt, answer)

    def send(self, answer: Answer) -> None:
        self._send(answer)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The LLM's text; everything received while the previous piece was processed is joined into one piece.

        Raises AnswerError.
        """
        received: list[Piece] = []
        has_more = asyncio.Event()
        reader = asyncio.ensure_future(self._read(received, has_more))
        reader.add_done_callback(lambda _: has_more.set())
        try:
            while received or not reader.done():
                await self._wait(has_more)
                has_more.clear()
                if received:
                    piece = _joined(received)
                    received.clear()
                    yield piece
            reader.result()
        finally:
            reader.cancel()
            reader.add_done_callback(forget_failure)
            await asyncio.wait({reader})  # not `await reader`: its failure would replace the reason for leaving

    async def _wait(self, has_more: asyncio.Event) -> None:
        """Raises AnswerError when the LLM is silent for too long."""
        settings = self._models.settings
        if not await happens(has_more.wait(), settings.llm_timeout_s):
            limit = f"llm_timeout_ms={settings.llm_timeout_s * 1e3:.0f}"
            raise AnswerError(f"{settings.llm} was silent for longer than {limit}", CapacityError)

    async def _read(self, received: list[Piece], has_more: asyncio.Event) -> None:
        """The LLM's stream to its end.  Raises AnswerError.  Cancelling the task cancels the LLM's request."""
        request = self._request
        call = Call(
            self._models.settings.llm,
            request.inputs,
            _OF_LLM,
            request_id=f"guarded-{uuid.uuid4().hex}",
            parameters=request.parameters,
            timeout_us=request.timeout_us,
        )
        try:
            async with aclosing(self._models.calls.stream(call)) as answers:
                async for outputs in answers:
                    received.append(_piece(outputs))
                    has_more.set()
        except AnswerError as failure:
            if str(failure).startswith(_REFUSES_TO_STREAM):  # the client never asked for that
                raise AnswerError(f"guarded needs a decoupled LLM; {call.model} said: {failure}") from None
            raise


def _piece(outputs: Tensors) -> Piece:
    text = b"".join(outputs["text_output"].reshape(-1)).decode("utf-8", "replace")
    reasons = [reason.decode() for reason in outputs["finish_reason"].reshape(-1) if reason]
    num_input, num_output = (int(outputs[name].sum()) for name in _OF_LLM[2:])
    return Piece(text, reasons[-1] if reasons else "", num_input, num_output)


def _joined(pieces: Sequence[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    return Piece(
        "".join(piece.text for piece in pieces),
        next((piece.finish_reason for piece in reversed(pieces) if piece.finish_reason), ""),
        max(piece.num_input_tokens for piece in pieces),
        sum(piece.num_output_tokens for piece in pieces),
    )
