"""The span of a request in the gateway, and the trace context that goes on to the engine with it. Event loop thread."""

from __future__ import annotations

import time
from dataclasses import dataclass

from slipstream.core.trace_context import AttributeValue, Span, TraceContext, read_traceparent
from slipstream.server.options import GatewayOptions
from slipstream.server.request_log import RequestRecord
from slipstream.tracing import Tracer, make_tracer

_OPERATIONS = {
    "chat": "chat",
    "responses": "chat",
    "messages": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}
_LEAST_FAILED_STATUS = 500


@dataclass(frozen=True)
class GatewayTracing:
    """tracer: None if the gateway reports no spans; a client's context goes on to the engine all the same."""

    tracer: Tracer | None

    def begin(self, record: RequestRecord, traceparent: str) -> None:
        """Give the record its place in the client's trace, or in a trace of its own."""
        record.parent = read_traceparent(traceparent)
        record.trace = record.parent if self.tracer is None else self.tracer.begin(record.parent)

    def end(self, record: RequestRecord, endpoint: str) -> None:
        if self.tracer is None or record.trace is None or not record.trace.is_sampled:
            return
        self.tracer.offer([_span(record, record.trace, endpoint)])


def make_tracing(options: GatewayOptions) -> GatewayTracing:
    """Raises ConfigError if the exporter is needed and not installed."""
    return GatewayTracing(
        make_tracer(options.otlp_endpoint, options.trace_ratio, "slipstream-gateway", "otlp_endpoint")
    )


def _span(record: RequestRecord, context: TraceContext, endpoint: str) -> Span:
    ended_ns, ended = time.time_ns(), time.monotonic()
    operation = _OPERATIONS.get(endpoint, endpoint)
    attributes: dict[str, AttributeValue] = {
        "http.request.method": record.method,
        "url.path": record.path,
        "http.response.status_code": record.status,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "slipstream",
        "gen_ai.request.model": record.model,
        "gen_ai.response.id": record.request_id,
    }
    if record.num_prompt_tokens is not None:
        attributes["gen_ai.usage.input_tokens"] = record.num_prompt_tokens
    if record.num_output_tokens is not None:
        attributes["gen_ai.usage.output_tokens"] = record.num_output_tokens
    if record.end:
        attributes["slipstream.end"] = record.end
    if record.first_byte:
        attributes["slipstream.first_byte_s"] = round(record.first_byte - record.started, 6)
    is_failed = record.status >= _LEAST_FAILED_STATUS or record.end == "error"
    return Span(
        f"{operation} {record.model}".strip(),
        context,
        record.parent.span_id if record.parent is not None else 0,
        ended_ns - int((ended - record.started) * 1e9),
        ended_ns,
        attributes,
        is_server=True,
        error=(record.error or f"status {record.status}") if is_failed else "",
    )
