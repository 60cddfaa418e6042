"""The spans of a request in the engine: one of the request, and those of its phases for each sequence.

Output thread. Attributes follow OpenTelemetry's conventions for generative AI where these have a name.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from slipstream.core.config import ServingConfig
from slipstream.core.outputs import RequestOutput
from slipstream.core.request import Request
from slipstream.core.trace_context import (
    TRACEPARENT,
    TRITON_TRACEPARENT,
    AttributeValue,
    Span,
    TraceContext,
    begin_span,
    read_traceparent,
)
from slipstream.protocol.request_parser import ClientRequest
from slipstream.tracing import Tracer, make_tracer

_CLOSE_S = 1.0  # the backend waits 2 s for the process to end


def make_request_tracer(serving: ServingConfig) -> RequestTracer | None:
    """None if there is no collector. Raises ConfigError if the exporter is not installed."""
    tracer = make_tracer(serving.otlp_endpoint, serving.trace_ratio, "slipstream", "otlp_endpoint")
    return RequestTracer(tracer, serving.model_name) if tracer is not None else None


class RequestTracer:
    """Gathers the ended sequences of requests, and reports each request with its last one."""

    def __init__(self, tracer: Tracer, model: str) -> None:
        self._tracer, self._model = tracer, model
        self._ended: dict[int, list[RequestOutput]] = {}  # by handle, of requests with several sequences

    def take_counts(self) -> tuple[int, int]:
        return self._tracer.take_counts()

    def ended(self, client: ClientRequest, output: RequestOutput) -> None:
        """A sequence has ended, and its last response is about to leave."""
        outputs = self._ended.setdefault(client.handle, [])
        outputs.append(output)
        if output.is_final:
            del self._ended[client.handle]
            self._report(client, outputs, time.time_ns())

    def forget(self, handle: int) -> None:
        self._ended.pop(handle, None)

    def close(self) -> None:
        self._tracer.close(_CLOSE_S)

    def _report(self, client: ClientRequest, outputs: list[RequestOutput], now_ns: int) -> None:
        parent = parent_of(client.trace_parameters)
        context = self._tracer.begin(parent)
        if not context.is_sampled:
            return
        request = outputs[0].request
        spans = [
            Span(
                f"text_completion {self._model}",
                context,
                parent.span_id if parent is not None else 0,
                request.times.arrival_ns or now_ns,
                now_ns,
                self._attributes(client, outputs),
                is_server=True,
                error=outputs[-1].error,
            )
        ]
        for output in outputs:
            spans += _phases(output.request, context, now_ns)
        self._tracer.offer(spans)

    def _attributes(self, client: ClientRequest, outputs: list[RequestOutput]) -> dict[str, AttributeValue]:
        requests = [output.request for output in outputs]
        first, params = requests[0], requests[0].params
        reasons = [output.finish_reason.value for output in outputs if output.finish_reason is not None]
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "slipstream",
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.usage.input_tokens": first.num_prompt_tokens,
            "gen_ai.usage.output_tokens": sum(request.num_output_tokens for request in requests),
            "gen_ai.response.finish_reasons": tuple(reasons),
            "slipstream.cached_tokens": first.num_cached_tokens,
            "slipstream.preemptions": sum(request.num_preemptions for request in requests),
            "slipstream.drafted_tokens": sum(request.num_drafted_tokens for request in requests),
            "slipstream.accepted_tokens": sum(request.num_accepted_tokens for request in requests),
        }
        if client.request_id:
            attributes["gen_ai.response.id"] = client.request_id
        if params.seed is not None:
            attributes["gen_ai.request.seed"] = str(params.seed)  # unsigned 64 bits: more than an attribute's integer
        return attributes


def parent_of(parameters: Mapping[str, object]) -> TraceContext | None:
    """Triton's own span, if it belongs to the client's trace or the client has none; else the client's.

    Triton does not know the trace of a client that gives it as a request parameter.
    """
    tritons, clients = (read_traceparent(parameters.get(name)) for name in (TRITON_TRACEPARENT, TRACEPARENT))
    if tritons is None or (clients is not None and clients.trace_id != tritons.trace_id):
        return clients
    if clients is not None and not clients.is_sampled:  # Triton traces by its own rate, whatever the client says
        return clients
    return tritons


def _phases(request: Request, parent: TraceContext, now_ns: int) -> list[Span]:
    """The phases of one sequence: queue, prefill, decode, output. A phase that it did not reach is left out."""
    times = request.times
    marks = [times.arrival_ns, times.first_scheduled_ns, times.first_token_ns, times.last_token_ns]
    reached = [mark for mark in marks if mark]
    ends = [*reached[1:], now_ns]
    index: dict[str, AttributeValue] = {"slipstream.sequence_index": request.sequence_index}
    return [
        Span(name, begin_span(parent, 1.0), parent.span_id, start, max(start, end), index)
        for name, start, end in zip(("queue", "prefill", "decode", "output"), reached, ends)
    ]
