"""Errors as answers: which code of Triton's a client gets for whose fault. Used by every thread that may refuse."""

from __future__ import annotations

from slipstream.core import wire
from slipstream.core.responses import error_code


def error_answer(handle: int, error: Exception) -> bytes:
    """The frame that ends a request with an error."""
    code = error_code(type(error))
    message = str(error) if code is not wire.ErrorCode.INTERNAL else f"internal error: {error}"
    return wire.encode_responses([wire.error_response(handle, code, message)])
