"""Numbers and texts past every limit, on the real server: INVALID_ARG for who sent them; the same engine goes on."""

from __future__ import annotations

import json

from llm_client import http_generate
from llm_server import LlmServer

EXTREMES = {
    "top_k": 2**40,
    "max_tokens": 2**63,
    "seed": 2**64,
    "timeout_ms": 10**400,
    "priority": -(2**31) - 1,
    "end_id": 2**31,
    "stop_token_ids": [2**63],
    "logit_bias": {str(2**40): 1.0},
    "bad_words_list": [[2**31], [1]],
    "repetition_penalty": 1e-300,
}


def test_an_extreme_number_is_the_clients_fault(llm_server: LlmServer) -> None:
    engines = [process.pid for process in llm_server.engines()]
    for name, value in EXTREMES.items():
        body = {"text_input": "a", "max_tokens": 2, "sampling_parameters": json.dumps({name: value})}
        if name == "max_tokens":
            del body["max_tokens"]
        status, reply = http_generate(llm_server.http_url, "llm", body)
        assert status == 400 and name in reply["error"], (name, reply)
        assert "internal error" not in reply["error"]
    body = {"text_input": "a", "sampling_parameters": json.dumps({"top_k": 2**31 - 1, "max_tokens": 2})}
    status, reply = http_generate(llm_server.http_url, "llm", body)
    assert status == 200 and reply["text_output"]
    assert [process.pid for process in llm_server.engines()] == engines


def test_a_text_that_cannot_fit_is_refused_at_once_by_every_reader(llm_server: LlmServer) -> None:
    text = "a " * 2**20
    for model, name in (("llm", "text_input"), ("preprocessing", "QUERY"), ("ensemble", "QUERY")):
        body = {"QUERY" if model == "preprocessing" else "text_input": text}
        status, reply = http_generate(llm_server.http_url, model, body)
        assert status == 400, reply
        assert f"{name}: the prompt has {len(text)} bytes, accepted: at most" in reply["error"]
