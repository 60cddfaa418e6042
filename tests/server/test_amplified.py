"""Requests of which the gateway would make far more than they have: bounded, or made beside the event loop."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest
from fake_triton import FakeTriton
from gateway import GatewayProcess
from patience import PATIENCE_S, wait_until
from slipstream.server.gateway import MAX_ECHOED_CHARS
from slipstream.server.pace import MAX_INTERVAL
from slipstream.server.schemas import MAX_PROMPTS
from slipstream.server.sse import MAX_EVENT_BYTES
from slipstream.server.triton import MAX_REPEATED_SETTINGS_BYTES

JSON = {"content-type": "application/json"}
SCRIPT = json.dumps({"pieces": ["x"]})


def post(gateway: GatewayProcess, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    headers = {"content-type": "application/json", "authorization": "Bearer sk-right"}
    request = urllib.request.Request(gateway.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize("stream", [False, True])
def test_settings_go_with_each_prompt_up_to_a_total(
    fake_gateway: GatewayProcess, fake_triton: FakeTriton, stream: bool
) -> None:
    most = MAX_REPEATED_SETTINGS_BYTES // MAX_PROMPTS
    body = {"model": "plain", "prompt": [SCRIPT] * MAX_PROMPTS, "stop": "s" * most, "stream": stream}
    before = len(fake_triton.requests)
    status, answer = post(fake_gateway, "/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert f"accepted: at most {MAX_REPEATED_SETTINGS_BYTES} bytes in all" in answer["error"]["message"]
    assert len(fake_triton.requests) == before
    status, _ = post(fake_gateway, "/v1/completions", {**body, "prompt": [SCRIPT] * 3, "stream": False})
    assert status == 200
    assert [sampling["stop"] for sampling in fake_triton.sampling[-3:]] == [[body["stop"]]] * 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["p" * 100_000] * 2}),
        ("/v1/completions", {"prompt": [[5] * 100_000] * 2, "stream": False}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "p" * 200_000}]}),
    ],
)
def test_an_echo_is_bounded_in_all_sequences(fake_gateway: GatewayProcess, path: str, body: dict[str, Any]) -> None:
    status, answer = post(fake_gateway, path, {"model": "plain", "echo": True, "n": 100, "stream": True, **body})
    assert (status, answer["error"]["param"]) == (400, "echo")
    assert (
        f"echo: would repeat 200000 characters or token ids n=100 times, accepted: at most {MAX_ECHOED_CHARS}"
        in (answer["error"]["message"])
    )


def test_long_events_of_several_streams_lose_nothing(fake_client: openai.OpenAI) -> None:
    """They are made on threads, beside short ones."""
    long: dict[str, Any] = {"pieces": ["\u00e9" * MAX_EVENT_BYTES, "b"], "repeat": 5}
    short: dict[str, Any] = {"pieces": ["c", "d"], "repeat": 5}
    prompts = [json.dumps(script) for script in (long, short, long)]
    usage = {"include_usage": True}
    chunks = list(fake_client.completions.create(model="plain", prompt=prompts, stream=True, stream_options=usage))
    texts = ["".join(c.choices[0].text for c in chunks if c.choices and c.choices[0].index == i) for i in range(3)]
    assert texts == ["".join(script["pieces"]) * 5 for script in (long, short, long)]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 30


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_surrogate_that_an_answer_repeats(fake_gateway: GatewayProcess, stream: bool) -> None:
    body = {"model": "plain", "input": SCRIPT, "user": "\ud800", "store": False, "stream": stream}
    headers = {"content-type": "application/json", "authorization": "Bearer sk-right"}
    request = urllib.request.Request(fake_gateway.url + "/v1/responses", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        assert reply.status == 200 and b'"user":"?"' in reply.read()


def test_a_client_cannot_ask_for_more_events_than_the_worker_has(fake_triton: FakeTriton) -> None:
    """Its own interval counts where it is the larger one."""
    script = {"pieces": ["x"], "repeat": 400}
    body = {"model": "plain", "prompt": json.dumps(script), "stream": True}

    def interval(**asked: int) -> int:
        assert completed(body | asked) == 200
        return fake_triton.sampling[-1]["stream_interval"]

    with GatewayProcess(fake_triton.url, ["--max-events-per-s", "10"]) as gateway:

        def completed(asked: dict[str, Any]) -> int:
            request = urllib.request.Request(gateway.url + "/v1/completions", json.dumps(asked).encode(), JSON)
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
                reply.read()
                return reply.status

        assert interval(stream_interval=3) == 3
        wait_until(lambda: interval(stream_interval=1) == MAX_INTERVAL, "the worker to be at its limit")
        assert interval(stream_interval=MAX_INTERVAL + 8) == MAX_INTERVAL + 8
