"""One trace over a client, the gateway, Triton and the engine, on a real server."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway import GatewayProcess
from llm_server import LlmServer, missing_server
from otlp_collector import CollectedSpan, OtlpCollector

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PHASES = ("queue", "prefill", "decode", "output")
ROOT_SPAN = "text_completion llm"


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as started:
        yield started


@pytest.fixture(scope="module")
def traced_server(
    collector: OtlpCollector, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlmServer]:
    """Triton with its own OpenTelemetry traces, and an engine with ours."""
    if reason := missing_server():
        pytest.skip(reason)
    traces = ["mode=opentelemetry", "level=TIMESTAMPS", "rate=1", "count=-1"]
    traces += [f"opentelemetry,url={collector.endpoint}/v1/traces", "opentelemetry,bsp_schedule_delay=200"]
    arguments = [f"--trace-config={setting}" for setting in traces]
    server = LlmServer(tmp_path_factory.mktemp("traced"), demo_model, extra_args=arguments, load_models=("llm",))
    with (server.repository / "llm/config.pbtxt").open("a") as config:
        config.write(f'parameters {{ key: "otlp_endpoint" value {{ string_value: "{collector.endpoint}" }} }}\n')
    with server:
        yield server


def complete(gateway: GatewayProcess, traceparent: str, **fields: object) -> None:
    body = {"model": "llm", "prompt": "def f(", "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    headers = {"content-type": "application/json", "traceparent": traceparent}
    request = urllib.request.Request(f"{gateway.url}/v1/completions", json.dumps(body).encode(), headers)
    assert urllib.request.urlopen(request, timeout=60).status == 200


def is_engines(span: CollectedSpan) -> bool:
    return span.service == "slipstream" and span.name == ROOT_SPAN


def names_above(span: CollectedSpan, collector: OtlpCollector) -> dict[str, str]:
    """Names of the spans above, by id, as far as the collector has them."""
    by_id, above = {one.span_id: one for one in collector.spans}, {}
    while span.parent_id in by_id:
        span = by_id[span.parent_id]
        above[span.span_id] = span.name
    return above


def test_gateway_triton_and_engine_share_a_trace(traced_server: LlmServer, collector: OtlpCollector) -> None:
    with GatewayProcess(traced_server.grpc_url, ["--otlp-endpoint", collector.endpoint]) as gateway:
        complete(gateway, f"00-{TRACE}-{SPAN}-01")
        spans = collector.wait(*PHASES, trace_id=TRACE)
    mine = [span for span in collector.spans if span.trace_id == TRACE and span.service == "slipstream-gateway"]
    [engine] = [span for span in collector.spans if span.trace_id == TRACE and is_engines(span)]
    assert engine.attributes["gen_ai.usage.output_tokens"] == 4
    assert engine.attributes["gen_ai.usage.input_tokens"] > 0
    assert engine.attributes["gen_ai.response.finish_reasons"] == ["length"]
    phases = [spans[name] for name in PHASES]
    assert {phase.parent_id for phase in phases} == {engine.span_id}
    assert [phase.start_ns for phase in phases[1:]] == [phase.end_ns for phase in phases[:-1]], "one after another"
    assert (phases[0].start_ns, phases[-1].end_ns) == (engine.start_ns, engine.end_ns)
    [gateway_span] = mine  # exported before the gateway ended
    assert gateway_span.parent_id == SPAN and gateway_span.attributes["gen_ai.usage.output_tokens"] == 4
    assert gateway_span.span_id in names_above(engine, collector), "Triton's spans lie between"


def test_the_engines_span_is_below_tritons(traced_server: LlmServer, collector: OtlpCollector) -> None:
    trace = TRACE[::-1]
    body = json.dumps({"text_input": "def f(", "max_tokens": 3}).encode()
    headers = {"content-type": "application/json", "traceparent": f"00-{trace}-{SPAN}-01"}
    url = f"http://{traced_server.http_url}/v2/models/llm/generate"
    assert urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60).status == 200
    spans = collector.wait(ROOT_SPAN, "InferRequest", trace_id=trace)
    above = names_above(spans[ROOT_SPAN], collector)
    assert "InferRequest" in above.values() and SPAN not in above


def test_what_a_client_does_not_want_traced_is_not(traced_server: LlmServer, collector: OtlpCollector) -> None:
    with GatewayProcess(traced_server.grpc_url, ["--otlp-endpoint", collector.endpoint]) as gateway:
        complete(gateway, f"00-{'12' * 16}-{SPAN}-00")
        complete(gateway, f"00-{'34' * 16}-{SPAN}-01", n=2)
        collector.wait(*PHASES, trace_id="34" * 16)
    spans = [span for span in collector.spans if span.trace_id == "34" * 16]
    assert next(span for span in spans if is_engines(span)).attributes["gen_ai.usage.output_tokens"] == 8
    ours = [span for span in collector.spans if span.service.startswith("slipstream")]
    assert sum(span.name == "decode" and span.trace_id == "34" * 16 for span in ours) == 2
    assert not [span for span in ours if span.trace_id == "12" * 16]
