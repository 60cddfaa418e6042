"""Grammars that are costly to compile or to match, beside a victim and beside another client's schema."""

from __future__ import annotations

import json

import pytest
from llm_client import grpc_infer, grpc_stream
from llm_server import LlmServer
from victim import assert_unharmed

pytestmark = pytest.mark.alone

PROMPT = "import os\n"
SAMPLED = {"max_tokens": 400, "temperature": 1.0, "seed": 1}
NESTED_LOOPS = ("regex", "((((([^0]*)*)*)*)*)*0")
AMBIGUOUS = ("ebnf_grammar", 'root ::= s "0"\ns ::= s s s | s s | [^0] | ""')
SIMPLE = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"]}
TOO_LARGE = {
    "guided_max_grammar_bytes": ("ebnf_grammar", "root ::= " + '"a" ' * 450_000),  # 1.8 MB
    "guided_max_properties": ("json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(10_000)}})),
    "guided_max_repeat": ("json_schema", json.dumps({"type": "string", "minLength": 1_000_000})),
}


def _inputs(kind: str, text: str) -> dict[str, object]:
    return {"text_input": PROMPT, "guided_decoding_guide_type": kind, "guided_decoding_guide": text}


def _answer_schema(server: LlmServer) -> None:
    answer = grpc_infer(
        server.grpc_url, "llm", {**_inputs("json_schema", json.dumps(SIMPLE)), "stream": True}, parameters=SAMPLED
    )
    assert not answer.error and json.loads(answer.text)["kind"] in ("cat", "dog")


def test_grammars_that_are_too_large_are_refused_at_once(llm_server: LlmServer) -> None:
    def ask() -> None:
        for parameter, guide in TOO_LARGE.items():
            answer = grpc_infer(llm_server.grpc_url, "llm", _inputs(*guide), parameters=SAMPLED)
            assert "guided_decoding_guide: " in answer.error and parameter in answer.error
        _answer_schema(llm_server)

    assert_unharmed(llm_server, ask)


def test_grammars_that_are_slow_to_match_keep_nobody_waiting(llm_server: LlmServer) -> None:
    _answer_schema(llm_server)  # the grammar process has started

    def ask() -> None:
        with (
            grpc_stream(llm_server.grpc_url, cancel=True) as first,
            grpc_stream(llm_server.grpc_url, cancel=True) as second,
        ):
            for stream, guide in ((first, NESTED_LOOPS), (second, AMBIGUOUS)):
                stream.send("llm", {**_inputs(*guide), "stream": True}, parameters=SAMPLED)
                for _ in range(20):  # by now it is slow, if it has not been ended for that
                    _, is_final, error = stream.receive()
                    assert not error or "accepted: guided_max_" in error
                    if is_final:
                        break
            _answer_schema(llm_server)

    assert_unharmed(llm_server, ask)
