"""Errors that a model answered with, and whose fault one is: a gRPC stream of Triton carries the text, not the code.

The code could be had by the metadata `triton_grpc_error`, but each error then risks the whole server: 2.51 aborts on a
reference count of gRPC (docs/measurements). So each error of this project's models ends with its code, as in "the model
is being unloaded [UNAVAILABLE]" (backend/triton/live_requests.cc, encoders/guarded_serving.py). Triton's own errors are
told by their form. No state; any thread.
"""

from __future__ import annotations

import re

from slipstream.core.errors import CapacityError, EngineError, RequestError, SlipstreamError

FIELD = re.compile(r"([A-Za-z_][\w.]{0,63}): ")  # that a message names first
CODES: dict[type[SlipstreamError], str] = {
    RequestError: "INVALID_ARG",
    CapacityError: "UNAVAILABLE",
    EngineError: "INTERNAL",
}
_FAULTS = {**{code: fault for fault, code in CODES.items()}, "UNSUPPORTED": RequestError}
_CODE = re.compile(r" \[(UNKNOWN|INTERNAL|NOT_FOUND|INVALID_ARG|UNAVAILABLE|UNSUPPORTED|ALREADY_EXISTS|CANCELLED)\]\Z")
_TRITON_AWAY = re.compile(  # whole forms, from the first word on: any error may hold these words
    r"(?:in ensemble '[^']*', )?(?:\[request id: [^\]]*\] )?(?:"
    r"Server exiting|Server is stopping\b|Request timeout expired|Exceeds maximum queue size"
    r"|Request for unknown model: '[^']*' has no available versions"
    r")",
)


class AnswerError(SlipstreamError):
    """fault: the class of error, as this project's models raise it, whose code it has."""

    def __init__(self, message: str, fault: type[SlipstreamError] = EngineError) -> None:
        super().__init__(message)
        self.fault = fault


def with_code(message: str, fault: type[SlipstreamError]) -> str:
    return f"{without_code(message)} [{CODES[fault]}]"


def without_code(message: str) -> str:
    return _CODE.sub("", message)


def fault_of(message: str) -> type[SlipstreamError]:
    """RequestError: the client's; CapacityError: full or away, it may succeed later; else EngineError."""
    code = _CODE.search(message)
    if code is not None:
        return _FAULTS.get(code.group(1), EngineError)
    return CapacityError if _TRITON_AWAY.match(message) else EngineError
