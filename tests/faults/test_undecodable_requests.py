"""Bytes that are not UTF-8, wherever Triton's HTTP server lets them through: an answer, and the same engine goes on."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from llm_client import http_generate
from llm_server import LlmServer

BODIES = {
    "value": (b'{"text_input": "a", "max_tokens": 2, "logit_bias": "\xff"}', b"logit_bias: not valid UTF-8"),
    "key": (b'{"text_input": "a", "max_tokens": 2, "\xff": 1}', b"not valid UTF-8"),
    "id": (b'{"text_input": "a", "max_tokens": 2, "id": "\xff"}', b"id: not valid UTF-8"),
    "prompt": (b'{"text_input": "a\xff", "max_tokens": 2}', b"text_input: not valid UTF-8"),
    "json": (b'{"text_input": "a", "sampling_parameters": "{\\"stop\\": \\"\\\\ud800\\"}"}', b"stop: not valid"),
}  # fmt: skip


@pytest.mark.parametrize("where", BODIES)
def test_undecodable_bytes_are_the_clients_fault(llm_server: LlmServer, where: str) -> None:
    body, words = BODIES[where]
    engines = [process.pid for process in llm_server.engines()]
    host = llm_server.http_url.removeprefix("http://")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(f"http://{host}/v2/models/llm/generate", body), timeout=30)
    assert refused.value.code == 400 and words in refused.value.read()
    status, reply = http_generate(llm_server.http_url, "llm", {"text_input": "a", "max_tokens": 2})
    assert status == 200 and reply["text_output"]
    assert [process.pid for process in llm_server.engines()] == engines
