"""An OpenTelemetry collector in the test's process: an HTTP server that keeps the spans that it is sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from patience import wait_until


@dataclass(frozen=True)
class CollectedSpan:
    """Ids are hexadecimal; parent_id is "" for the first span of a trace."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    is_error: bool


class OtlpCollector:
    """`with OtlpCollector() as collector: ... collector.spans`. status: what it answers; hold(): it does not answer."""

    def __init__(self, status: int = 200) -> None:
        self.spans: list[CollectedSpan] = []
        self._answers = threading.Event()
        self._answers.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector._answers.wait()
                if status == 200 and self.path == "/v1/traces":
                    collector.spans += _read_json(body) if "json" in self.headers["content-type"] else _read(body)
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> OtlpCollector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._answers.set()
        self._server.shutdown()
        self._server.server_close()

    def hold(self) -> None:
        self._answers.clear()

    def wait(self, *names: str, trace_id: str) -> dict[str, CollectedSpan]:
        """The spans of a trace by name, once these are there."""

        def found() -> dict[str, CollectedSpan]:
            return {span.name: span for span in self.spans if span.trace_id == trace_id}

        wait_until(lambda: set(names) <= found().keys(), f"spans {names} of {trace_id}")
        return found()


def _read(body: bytes) -> list[CollectedSpan]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        CollectedSpan(
            span.name,
            _values(group.resource.attributes).get("service.name", ""),
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _values(span.attributes),
            span.status.code == 2,
        )
        for group in request.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def _read_json(body: bytes) -> list[CollectedSpan]:
    """What Triton sends."""
    return [
        CollectedSpan(
            span["name"],
            "triton",
            span["traceId"],
            span["spanId"],
            span.get("parentSpanId", ""),
            int(span["startTimeUnixNano"]),
            int(span["endTimeUnixNano"]),
            {},
            False,
        )
        for group in json.loads(body)["resourceSpans"]
        for scope in group["scopeSpans"]
        for span in scope["spans"]
    ]


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
