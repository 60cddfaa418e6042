"""Errors that another model answered with, and whose fault one is whose code is lost, as in a gRPC stream.

The code could be had by the metadata `triton_grpc_error`, but each error then risks the whole server: 2.51 aborts on a
reference count of gRPC (docs/measurements). So the forms that this project's messages have tell. No state; any thread.
"""

from __future__ import annotations

import re

from slipstream.core.client_settings import names
from slipstream.core.errors import CapacityError, EngineError, RequestError, SlipstreamError

FIELD = re.compile(r"([A-Za-z_][\w.]{0,63}): ")  # that a message names first
_SETTINGS = frozenset({"prompt", "eos_token_ids", "bad_words_ids", "stop_words_ids", "guided_decoding", *names()})
_UNKNOWN_SETTING = re.compile(r"\S+: unknown (?:sampling|request) parameter")
_AWAY = re.compile(  # whole forms, from the first word on: an engine's text may hold any of these words
    r"(?:in ensemble '[^']*', )?(?:\[request id: [^\]]*\] )?(?:"
    r"\d+ requests are (?:running|waiting)\b.*max_waiting_requests="
    r"|the engine of model '[^']*' .*; it is being restarted$"
    r"|(?:the model|model '[^']*') is being unloaded$"
    r"|the model was unloaded before the request ended$"
    r"|the server is shutting down(?:$|:| and )"
    r"|guarded was unloaded$|triton_url: nothing answers |\S+ was silent for longer than llm_timeout_ms="
    # Triton's own
    r"|Server exiting|Server is stopping\b|Request timeout expired|Exceeds maximum queue size"
    r"|Request for unknown model: '[^']*' has no available versions"
    r")",
    re.DOTALL,
)


class AnswerError(SlipstreamError):
    """fault: the class of error, as this project's models raise it, whose code it has."""

    def __init__(self, message: str, fault: type[SlipstreamError] = EngineError) -> None:
        super().__init__(message)
        self.fault = fault


def fault_of(message: str) -> type[SlipstreamError]:
    """RequestError: the client's; CapacityError: full or away, it may succeed later; else EngineError."""
    field = FIELD.match(message)
    if (field and field.group(1).partition(".")[0] in _SETTINGS) or _UNKNOWN_SETTING.match(message):
        return RequestError
    return CapacityError if _AWAY.match(message) else EngineError
