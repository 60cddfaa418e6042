"""An answer that a time limit cuts off says so in every API, beside a reason that the API's clients know."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from gateway import GatewayProcess

CUT_OFF = {"pieces": ["half an ", "answer"], "reason": "timeout"}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user"}]},
    "/v1/completions": {},
    "/v1/responses": {},
    "/v1/messages": {"messages": [{"role": "user"}], "max_tokens": 50},
}


def post(running: GatewayProcess, path: str, script: dict[str, Any], stream: bool) -> list[dict[str, Any]]:
    """The answer, or the events of its stream."""
    body = {"model": "plain", "timeout_ms": 1000, "stream": stream, **json.loads(json.dumps(ASKED[path]))}
    if "messages" in body:
        body["messages"][0]["content"] = json.dumps(script)
    else:
        body["input" if path.endswith("responses") else "prompt"] = json.dumps(script)
    request = urllib.request.Request(running.url + path, json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request) as reply:
        text = reply.read().decode()
    if not stream:
        return [json.loads(text)]
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def ending(path: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    """The object that has the reason."""
    if path.endswith("completions"):
        return next(event["choices"][0] for event in reversed(events) if event["choices"])
    if path.endswith("responses"):
        return events[-1].get("response", events[-1])["incomplete_details"] or {}
    return next(found for event in reversed(events) if "stop_reason" in (found := event.get("delta", event)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "name", "reason"),
    [
        ("/v1/chat/completions", "finish_reason", "length"),
        ("/v1/completions", "finish_reason", "length"),
        ("/v1/responses", "reason", "max_output_tokens"),
        ("/v1/messages", "stop_reason", "max_tokens"),
    ],
)
def test_a_time_out_is_told(open_gateway: GatewayProcess, path: str, name: str, reason: str, stream: bool) -> None:
    cut_off = ending(path, post(open_gateway, path, CUT_OFF, stream))
    assert (cut_off[name], cut_off.get("timed_out")) == (reason, True)
    for other in ("length", "stop"):
        ended = ending(path, post(open_gateway, path, {**CUT_OFF, "reason": other}, stream))
        assert "timed_out" not in ended and (other == "stop" or ended[name] == reason)
