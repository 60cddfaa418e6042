"""Exports spans to an OTLP collector (HTTP, protobuf) from a thread of its own.

`offer` may be called on any thread and never waits: what a slow or absent collector does not take in time is dropped
and counted. OpenTelemetry's own exporter does the sending; it is imported here alone, and only when tracing is on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import slipstream
from slipstream.core.errors import ConfigError
from slipstream.core.trace_context import Span, TraceContext, begin_span

logger = logging.getLogger(__name__)
MAX_QUEUED_SPANS = 4096
_MAX_BATCH = 512
_BATCH_S = 0.5  # how long spans gather
_EXPORT_TIMEOUT_S = 10.0
Export = Callable[[Sequence[Span]], bool]


class Tracer:
    """ratio: share of requests without a parent that are traced. export: sends a batch, False if that failed."""

    def __init__(self, export: Export, ratio: float = 1.0, close: Callable[[], None] = lambda: None) -> None:
        self.ratio = ratio
        self._export, self._close = export, close
        self._lock = threading.Lock()
        self._queue: list[Span] = []
        self._has_news = threading.Event()
        self._is_closed = False
        self._num_exported = self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._thread.start()

    def begin(self, parent: TraceContext | None) -> TraceContext:
        return begin_span(parent, self.ratio)

    def offer(self, spans: Sequence[Span]) -> None:
        """Queue the spans of a request, all or none. Any thread; never waits for the collector."""
        with self._lock:
            if self._is_closed or len(self._queue) + len(spans) > MAX_QUEUED_SPANS:
                self._num_dropped += len(spans)
                return
            self._queue.extend(spans)
        self._has_news.set()

    def take_counts(self) -> tuple[int, int]:
        """(exported, dropped) since the last call."""
        with self._lock:
            counts = self._num_exported, self._num_dropped
            self._num_exported = self._num_dropped = 0
        return counts

    def close(self, timeout_s: float = 2.0) -> None:
        """Export what is queued, within the time."""
        with self._lock:
            self._is_closed = True
        self._has_news.set()
        self._thread.join(timeout_s)
        self._close()

    def _run(self) -> None:
        while True:
            self._has_news.wait()
            if not self._is_closed:
                threading.Event().wait(_BATCH_S)
            with self._lock:
                batch, self._queue = self._queue[:_MAX_BATCH], self._queue[_MAX_BATCH:]
                if not self._queue and not self._is_closed:
                    self._has_news.clear()
                is_over = self._is_closed and not batch
            if is_over:
                return
            if batch:
                self._send(batch)

    def _send(self, batch: list[Span]) -> None:
        try:
            is_exported = self._export(batch)
        except Exception:  # the one catch-all of this thread's loop
            logger.exception("spans could not be exported")
            is_exported = False
        with self._lock:
            if is_exported:
                self._num_exported += len(batch)
            else:
                self._num_dropped += len(batch)


def make_tracer(endpoint: str, ratio: float, service: str, parameter: str) -> Tracer | None:
    """None without an endpoint. Raises ConfigError, which names `parameter`, if the exporter is not installed."""
    if not endpoint:
        return None
    try:
        exporter, make = _exporter(endpoint, service)
    except ImportError as error:
        needed = f"needs {error.name}, which is not installed; pip install 'slipstream[tracing]'"
        raise ConfigError(parameter, endpoint, needed) from None
    return Tracer(make, ratio, exporter.shutdown)


def _exporter(endpoint: str, service: str) -> tuple[Any, Export]:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    resource = Resource.create({"service.name": service, "service.version": slipstream.__version__})
    scope = InstrumentationScope("slipstream", slipstream.__version__)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=_EXPORT_TIMEOUT_S)
    sampled = TraceFlags(TraceFlags.SAMPLED)

    def readable(span: Span) -> ReadableSpan:
        trace_id = span.context.trace_id
        return ReadableSpan(
            span.name,
            SpanContext(trace_id, span.context.span_id, is_remote=False, trace_flags=sampled),
            SpanContext(trace_id, span.parent_id, is_remote=span.is_server) if span.parent_id else None,
            resource,
            span.attributes,
            kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=scope,
        )

    def export(spans: Sequence[Span]) -> bool:
        return exporter.export([readable(span) for span in spans]) is SpanExportResult.SUCCESS

    return exporter, export
