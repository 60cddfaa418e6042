"""Errors as answers: which code of Triton's a client gets for whose fault. Used by every thread that may refuse."""

from __future__ import annotations

import logging
from collections.abc import Callable

from slipstream.core import wire
from slipstream.core.errors import CapacityError, EngineError, RequestError, internal_error
from slipstream.core.responses import error_code

logger = logging.getLogger(__name__)


def error_answer(handle: int, error: Exception) -> bytes:
    """The frame that ends a request with an error. Only errors made for clients keep their text."""
    if not isinstance(error, (RequestError, CapacityError, EngineError)):
        error = internal_error(logger, "a request failed in an unforeseen way", error)
    return wire.encode_responses([wire.error_response(handle, error_code(type(error)), str(error))])


def too_large(handle: int, response: bytes) -> bytes:
    """The error that a request ends with because no frame should hold its response."""
    message = f"response: has {len(response)} bytes, accepted: at most {wire.MAX_RESPONSE_BYTES}; stream it"
    return wire.error_response(handle, wire.ErrorCode.INVALID_ARG, message)


def read_request(payload: bytes, answer: Callable[[bytes], None]) -> wire.Request | None:
    """The request of a REQUEST frame; None when it cannot be read and has been answered with an error.

    Raises wire.ProtocolError only for a payload without a handle, which leaves nobody to answer.
    """
    try:
        return wire.decode_request(payload)
    except Exception as error:
        failure = internal_error(logger, "a REQUEST frame cannot be read", error)
        answer(error_answer(wire.handle_of(payload), failure))
        return None
