"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}}, and their status; as
Anthropic's do, {"type": "error", "error": {...}} with its types, from the paths of its API.

One table maps Triton's codes on HTTP's. No state; any thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from starlette.exceptions import HTTPException

from slipstream.core.answer_faults import FIELD, fault_of, without_code
from slipstream.core.errors import CapacityError, EngineError, RequestError, SlipstreamError

RETRY_AFTER_S = 1
_NAMES = {
    "text_input": "prompt",
    "input_ids": "prompt",
    "guided_decoding_guide": "structured_outputs",
}  # ours -> OpenAI's
_STATUS: dict[type[SlipstreamError], grpc.StatusCode] = {
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    CapacityError: grpc.StatusCode.UNAVAILABLE,
    EngineError: grpc.StatusCode.INTERNAL,
}
_MESSAGES_PATH = "/v1/messages"
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}  # Anthropic's
_FULL = re.compile(r"max_waiting_requests=|max_total_request_bytes=")
_TOO_LONG = re.compile(
    r"(?:^prompt: |the prompt )has (?:more than )?\d+ (?:bytes|tokens)(?:.*max_model_len=(\d+))?", re.DOTALL
)


class ApiError(HTTPException):
    """An error response. An HTTPException, because FastAPI passes no other exception through while it reads a body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        super().__init__(status, message, headers or None)
        self.message, self.code, self.param = message, code, param

    def body(self, path: str) -> dict[str, Any]:
        return error_body(path, self.status_code, self.message, self.code, self.param)


def is_of_messages(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == _MESSAGES_PATH or path.startswith(_MESSAGES_PATH + "/")


def error_body(
    path: str, status: int, message: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """The JSON of an error of a request to this path; `type` follows from the status."""
    told = {"message": message, "param": param, "code": code}
    if is_of_messages(path):
        kind = _MESSAGES_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, **told}}
    if status == 429:
        kind = "rate_limit_error"
    elif status == 401:
        kind = "authentication_error"
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {**told, "type": kind}}


@contextmanager
def refused(param: str | None = None) -> Iterator[None]:
    """A RequestError of what is done within becomes ApiError 400. param: of its answer; None: the error's own field."""
    try:
        yield
    except RequestError as error:
        raise ApiError(400, str(error), param=error.field if param is None else param) from None


def model_not_found(name: str, known: list[str], instead: str = "does not exist; there are") -> ApiError:
    """instead: what is wrong with the model, and what the known ones are."""
    names = ", ".join(sorted(known)) or "none is ready"
    return ApiError(404, f"The model {name!r} {instead}: {names}", code="model_not_found", param="model")


def from_text(message: str) -> ApiError:
    """An error inside a stream, whose code is in its text."""
    return from_grpc(_STATUS[fault_of(message)], message)


def from_grpc(status: grpc.StatusCode, message: str) -> ApiError:
    """Triton's answer as ours. The engine names the field first ("top_p: got 3, ..."); that becomes `param`."""
    message = without_code(message)
    if status is grpc.StatusCode.INVALID_ARGUMENT:
        return _wrong_request(message)
    is_unknown = "unknown model" in message and status is not grpc.StatusCode.UNAVAILABLE
    if status is grpc.StatusCode.NOT_FOUND or is_unknown:
        return ApiError(404, message, code="model_not_found", param="model")
    if status is grpc.StatusCode.UNAVAILABLE:
        if _FULL.search(message):
            return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=RETRY_AFTER_S)
        return ApiError(503, message or "the server is not reachable", code="unavailable", retry_after_s=RETRY_AFTER_S)
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ApiError(504, message, code="timeout")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return ApiError(413, message, code="request_too_large")
    return ApiError(500, message, code="internal_error")


def _wrong_request(message: str) -> ApiError:
    """The field by the name that requests have for it. A prompt that is too long is told in the words, too, by which
    clients of OpenAI's (LiteLLM) and of Anthropic's know it, as they then send a shorter one or ask another model."""
    field, too_long = FIELD.match(message), _TOO_LONG.search(message)
    ours = field.group(1) if field else ""
    param = _NAMES.get(ours, ours)
    message = param + message.removeprefix(ours)
    if too_long and too_long[1]:
        message += f". The prompt is too long: this model's maximum context length is {too_long[1]} tokens"
    return ApiError(400, message, code="context_length_exceeded" if too_long else None, param=param or None)
