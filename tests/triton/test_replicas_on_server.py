"""Two engines of the demo model behind one name: texts, caches, sleep and metrics of the real thing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llm_client import http_generate
from llm_server import LlmServer

PROMPT = "def fibonacci(n):\n"
LONG = "\n".join(f"def number_{i}():\n    return {i}\n" for i in range(40))
PARAMETERS = {"enable_sleep_mode": "true", "max_num_seqs": 8, "drain_timeout_s": 5}
QUERIES, HITS = (f"slipstream_prefix_cache_{kind}_tokens_total" for kind in ("queries", "hits"))
LABELS = ("0", "1")


@pytest.fixture(scope="module")
def pair(llm_server: LlmServer) -> Iterator[str]:
    with llm_server.variant("pair", PARAMETERS, extra="instance_group { count: 2 kind: KIND_CPU }\n") as name:
        yield name


def test_both_replicas_answer_as_one_engine_does(llm_server: LlmServer, pair: str, greedy: Callable[..., str]) -> None:
    def ask(prompt: str, **settings: Any) -> Any:
        body = {"text_input": prompt, "exclude_input_in_output": True, "max_tokens": 24, "temperature": 0.0, **settings}
        status, reply = http_generate(llm_server.http_url, pair, body)
        assert status == 200, reply
        return reply["text_output"]

    assert [ask(PROMPT) for _ in range(2)] == [greedy(PROMPT)] * 2  # too short to have a place: one each
    llm_server.wait_until(
        lambda: all(llm_server.metric(QUERIES, pair, replica=one) for one in LABELS), "both to be used"
    )
    ask(LONG)
    ask(LONG + PROMPT)
    ask(LONG + PROMPT + greedy(PROMPT))
    llm_server.wait_until(lambda: llm_server.metric(HITS, pair) > 512, "the hits of two turns")
    assert sorted(bool(llm_server.metric(HITS, pair, replica=one)) for one in LABELS) == [False, True]


def test_a_command_reaches_both(llm_server: LlmServer, pair: str, greedy: Callable[..., str]) -> None:
    def control(command: str) -> Any:
        status, reply = http_generate(llm_server.http_url, pair, {"control": command})
        assert status == 200, reply
        return json.loads(reply["text_output"])

    def levels() -> list[float]:
        return [llm_server.metric("slipstream_sleep_level", pair, replica=replica) for replica in LABELS]

    assert control("sleep")["is_sleeping"] and control("is_sleeping")["is_sleeping"]
    llm_server.wait_until(lambda: levels() == [1, 1], "both to sleep")
    status, refused = http_generate(llm_server.http_url, pair, {"text_input": PROMPT})
    assert status != 200 and "sleeps" in refused["error"]
    assert not control("wake_up")["is_sleeping"]
    llm_server.wait_until(lambda: levels() == [0, 0], "both to be awake")
    status, reply = http_generate(
        llm_server.http_url, pair, {"text_input": PROMPT, "exclude_input_in_output": True, "max_tokens": 24, "top_k": 1}
    )
    assert status == 200 and reply["text_output"] == greedy(PROMPT)
