"""tracing.py and core/trace_context.py: contexts as W3C writes them, and an exporter that never holds anybody up."""

from __future__ import annotations

import sys
import threading

import pytest
import toy_tokenizers
from otlp_collector import OtlpCollector
from patience import wait_until
from slipstream.core.config import EngineConfig
from slipstream.core.config_parse import config_from_values
from slipstream.core.errors import ConfigError
from slipstream.core.trace_context import Span, TraceContext, begin_span, read_traceparent
from slipstream.protocol import wire
from slipstream.protocol.request_parser import parse_request
from slipstream.tokenizer.tokenizer import TextTokenizer
from slipstream.tracing import MAX_QUEUED_SPANS, Tracer, make_tracer
from wire_requests import request, tensor

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def span(number: int = 1) -> Span:
    return Span(f"span {number}", TraceContext(7, number), 0, 10**18, 10**18 + 5, {"gen_ai.request.top_k": 3})


class Counts:
    """Sums of a tracer's counts."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.exported = self.dropped = 0

    def update(self) -> Counts:
        exported, dropped = self._tracer.take_counts()
        self.exported += exported
        self.dropped += dropped
        return self


@pytest.mark.parametrize(
    ("text", "is_sampled"),
    [(f"00-{TRACE}-{SPAN}-01", True), (f"00-{TRACE}-{SPAN}-00", False), (f"01-{TRACE}-{SPAN}-03-more", True)],
)
def test_a_traceparent_is_read(text: str, is_sampled: bool) -> None:
    assert read_traceparent(text) == TraceContext(int(TRACE, 16), int(SPAN, 16), is_sampled)


@pytest.mark.parametrize(
    "text",
    [
        "",
        None,
        7,
        "garbage",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01-{'x' * 1000}",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_what_is_no_traceparent_is_ignored(text: object) -> None:
    assert read_traceparent(text) is None


def test_what_is_not_read_is_not_kept_until_the_answer() -> None:
    """A client may send megabytes under these names."""
    sent: dict[str, wire.ParameterValue] = {"traceparent": "00-a-b-01", "triton_traceparent": "x" * 513}
    sent |= {"tracestate": "x" * 10**6, "baggage": "y"}
    raw = request(tensor("text_input", "x"), parameters=sent)
    client = parse_request(raw, EngineConfig(), TextTokenizer(toy_tokenizers.sentencepiece()))
    assert client.trace_parameters == {"traceparent": "00-a-b-01"}


def test_a_new_span_continues_its_parent_or_begins_a_trace() -> None:
    parent = TraceContext(int(TRACE, 16), 5, is_sampled=False)
    child = begin_span(parent, 1.0)
    assert (child.trace_id, child.is_sampled) == (parent.trace_id, False) and child.span_id != 5
    assert read_traceparent(child.header) == child
    assert begin_span(None, 1.0).is_sampled and not begin_span(None, 0.0).is_sampled
    assert begin_span(None, 1.0).trace_id != begin_span(None, 1.0).trace_id


def test_spans_reach_a_collector_as_they_were() -> None:
    with OtlpCollector() as collector:
        tracer = make_tracer(collector.endpoint, 1.0, "unit", "otlp_endpoint")
        assert tracer is not None
        failed = Span("bad", TraceContext(7, 2), 1, 10**18, 10**18, {"reasons": ("a", "b")}, True, "it broke")
        tracer.offer([span(), failed])
        found = collector.wait("span 1", "bad", trace_id=f"{7:032x}")
        tracer.close()
        assert Counts(tracer).update().exported == 2
    assert found["span 1"].parent_id == "" and found["span 1"].attributes == {"gen_ai.request.top_k": 3}
    assert (found["span 1"].start_ns, found["span 1"].end_ns) == (10**18, 10**18 + 5)
    assert found["bad"].is_error and found["bad"].parent_id == f"{1:016x}" and found["bad"].service == "unit"
    assert found["bad"].attributes == {"reasons": ["a", "b"]}


def test_a_stuck_collector_holds_nobody_up_and_what_is_lost_is_counted() -> None:
    may_end, is_in = threading.Event(), threading.Event()

    def export(spans: object) -> bool:
        is_in.set()
        return may_end.wait(60)

    tracer = Tracer(export)
    tracer.offer([span()])
    assert is_in.wait(60)
    for number in range(MAX_QUEUED_SPANS + 100):  # would never end, if it waited
        tracer.offer([span(number)])
    counts = Counts(tracer).update()
    assert counts.exported == 0 and counts.dropped == 100
    may_end.set()
    wait_until(lambda: counts.update().exported == MAX_QUEUED_SPANS + 1, "the rest to be exported")
    tracer.close()
    tracer.offer([span()])
    assert counts.update().dropped == 101, "after its end a tracer takes nothing"


def test_a_failing_collector_loses_spans_and_no_more() -> None:
    def export(spans: object) -> bool:
        raise OSError("the collector is on fire")

    tracer = Tracer(export)
    counts = Counts(tracer)
    for total in (1, 2):
        tracer.offer([span()])
        wait_until(lambda total=total: counts.update().dropped == total, "the span to be given up")
    tracer.close()


def test_a_collector_that_refuses_is_counted_too() -> None:
    with OtlpCollector(status=400) as collector:
        tracer = make_tracer(collector.endpoint, 1.0, "unit", "otlp_endpoint")
        assert tracer is not None
        tracer.offer([span(), span(2)])
        counts = Counts(tracer)
        wait_until(lambda: counts.update().dropped == 2, "the spans to be given up")
        tracer.close()


def test_without_the_extra_the_parameter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_tracer("", 1.0, "unit", "otlp_endpoint") is None, "off needs nothing"
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"otlp_endpoint='http://collector:4318': .*slipstream\[tracing\]"):
        make_tracer("http://collector:4318", 1.0, "unit", "otlp_endpoint")


@pytest.mark.parametrize(
    "given",
    [{"otlp_endpoint": "collector:4318"}, {"otlp_endpoint": "ftp://collector"}, {"trace_ratio": "1.5"}],
)
def test_bad_parameters_are_named(given: dict[str, str]) -> None:
    [name] = given
    with pytest.raises(ConfigError, match=name):
        config_from_values(given, is_complete=False)
