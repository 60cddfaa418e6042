"""Which trace a request belongs to, and the spans that are reported of it. Standard library only, no I/O.

Source: W3C Trace Context (the header `traceparent`) and OpenTelemetry's data model of spans.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

TRACEPARENT = "traceparent"
TRITON_TRACEPARENT = "triton_traceparent"  # of Triton's own span: the backend adds it to a request that Triton traces
# request parameters that tell a context: headers that Triton forwards, and the backend's own
PROPAGATED = frozenset({TRACEPARENT, "tracestate", "baggage", TRITON_TRACEPARENT})
_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.S)
_MOST_CHARS = 512
AttributeValue = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span's place: its trace, its own id, and whether the trace is recorded."""

    trace_id: int
    span_id: int
    is_sampled: bool = True

    @property
    def header(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


@dataclass(frozen=True, slots=True)
class Span:
    """Times are CLOCK_REALTIME nanoseconds. parent_id: 0 for the first of a trace. error: why it failed, or ""."""

    name: str
    context: TraceContext
    parent_id: int
    start_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    is_server: bool = False
    error: str = ""


def read_traceparent(text: object) -> TraceContext | None:
    """The context of a `traceparent`; None for one that is not valid, which W3C says to ignore."""
    if not isinstance(text, str) or len(text) > _MOST_CHARS:
        return None
    found = _HEADER.fullmatch(text)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    return TraceContext(trace_id, span_id, bool(int(found[4], 16) & 1)) if trace_id and span_id else None


def trace_parameters(given: Mapping[str, object]) -> dict[str, str]:
    """Those that may name a context. They are kept until the request is answered, so none that is too long to be read,
    and no header that is only passed on."""
    found = ((name, given.get(name)) for name in (TRACEPARENT, TRITON_TRACEPARENT))
    return {name: text for name, text in found if isinstance(text, str) and len(text) <= _MOST_CHARS}


def begin_span(parent: TraceContext | None, ratio: float) -> TraceContext:
    """The place of a new span. ratio: share of the requests without a parent that are traced."""
    span_id = random.getrandbits(64) or 1
    if parent is not None:
        return TraceContext(parent.trace_id, span_id, parent.is_sampled)
    return TraceContext(random.getrandbits(128) or 1, span_id, random.random() < ratio)


ENDPOINT_FORM = "empty, or the http:// or https:// address of an OTLP collector, such as http://localhost:4318"


def is_endpoint(text: str) -> bool:
    return not text or re.fullmatch(r"https?://[^/\s?#]+[^\s?#]*", text) is not None
