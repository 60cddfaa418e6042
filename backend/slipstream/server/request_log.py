"""One line in the log for each request: who asked what, what it cost, how it ended.

Event loop thread; guard.py makes the record of a request and writes it. What clients send is escaped and cut, so that
no request can forge a line.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from slipstream.core.trace_context import TraceContext
from slipstream.server.chat_page import is_page

logger = logging.getLogger(__name__)
CLIENT_LEFT = "client_gone"
FORMATS = ("text", "json")
MAX_CLIENT_ID_CHARS = 128
_MAX_CHARS = 200  # of a value of the line
_CLIENT_ID = re.compile(rf"[A-Za-z0-9._:/=+-]{{1,{MAX_CLIENT_ID_CHARS}}}")
_PLAIN = re.compile(r"[!#-\[\]-~]+")  # printable ASCII but for spaces, quotes and backslashes
_QUIET = frozenset({"/health", "/ready", "/metrics", "/openapi.json"})


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request. Times are time.monotonic() seconds. num_prompt_tokens: None if nobody counted.

    end: the engine's finish reason, `error` or `client_gone`; empty for an answer without generation.
    """

    method: str
    path: str
    request_id: str = field(default_factory=lambda: secrets.token_hex(12))
    model: str = ""
    key: str = ""
    is_streamed: bool = False
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    status: int = 0
    started: float = field(default_factory=time.monotonic)
    first_byte: float = 0.0
    end: str = ""
    error: str = ""
    warning: str = ""  # for the header of that name
    parent: TraceContext | None = None  # the client's
    trace: TraceContext | None = None  # this request's, which the engine continues

    def adopt_id(self, given: str) -> None:
        """Take a client's own id, if it can stand in a header and a log."""
        if _CLIENT_ID.fullmatch(given):
            self.request_id = given

    def count(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self.num_prompt_tokens = (self.num_prompt_tokens or 0) + num_prompt_tokens
        self.num_output_tokens = (self.num_output_tokens or 0) + num_output_tokens

    def fail(self, message: str) -> None:
        """Note the error that ended the request; that its client has left is none."""
        if self.end != CLIENT_LEFT:
            self.end, self.error = "error", message

    def fields(self) -> dict[str, Any]:
        """The line's values; those that are not known are left out."""
        values = {
            "id": self.request_id,
            "trace": f"{self.trace.trace_id:032x}" if self.trace is not None else None,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "model": self.model,
            "key": self.key,
            "stream": self.is_streamed or None,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "first_byte_ms": round(1e3 * (self.first_byte - self.started), 1) if self.first_byte else None,
            "total_ms": round(1e3 * (time.monotonic() - self.started), 1),
            "end": self.end,
            "warning": self.warning,
            "error": self.error,
        }
        return {name: _cut(value) for name, value in values.items() if value not in (None, "")}

    def write(self) -> None:
        """Log the line: INFO, but for probes and pages."""
        level = logging.DEBUG if self.path in _QUIET or is_page(self.path) else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(level, "request", extra={"fields": self.fields()})


def _cut(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= _MAX_CHARS:
        return value
    return value[: _MAX_CHARS - 3] + "..."


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class TextFormatter(logging.Formatter):
    """`time LEVEL logger: message name=value ...`"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        return " ".join([super().format(record), *(f"{name}={_shown(value)}" for name, value in fields.items())])


class JsonFormatter(logging.Formatter):
    """An object a line: time, level, logger, message, and the fields of a request."""

    def format(self, record: logging.LogRecord) -> str:
        time_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"
        body = {"time": time_text, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return json.dumps({**body, **getattr(record, "fields", {})})


def set_up(level: str, form: str) -> None:
    """The log of this process: level and form are options of the gateway."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
