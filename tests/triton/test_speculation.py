"""Speculation on the real server: the same text, and the outputs and metrics that say what drafts were worth."""

from __future__ import annotations

from typing import Any

from llm_client import grpc_infer, http_generate
from llm_server import LlmServer

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n"
COUNTS = ("total_draft_tokens", "total_accepted_draft_tokens")


def test_drafts_leave_the_text_and_are_counted(llm_server: LlmServer) -> None:
    inputs = {"text_input": PROMPT, "max_tokens": 48, "temperature": 0.0, "exclude_input_in_output": True}

    def ask(model: str, **more: Any) -> dict[str, Any]:
        answer = grpc_infer(llm_server.grpc_url, model, {**inputs, "return_perf_metrics": True, **more})
        assert not answer.error, answer.error
        return answer.responses[0]

    plain = ask("llm")
    with llm_server.variant("drafting_eagerly", {"speculative_method": "ngram", "ngram_min": 1}) as name:
        drafted = ask(name)
        assert drafted["text_output"] == plain["text_output"]
        count, accepted = (int(drafted[output][0]) for output in COUNTS)
        assert 0 < accepted <= count
        assert abs(float(drafted["acceptance_rate"][0]) - accepted / count) < 1e-6
        off = ask(name, num_draft_tokens=0)
        assert off["text_output"] == plain["text_output"] and int(off["total_draft_tokens"][0]) == 0
        known = ask(name, reference_text=plain["text_output"][0])
        assert known["text_output"] == plain["text_output"]
        assert int(known["total_accepted_draft_tokens"][0]) >= accepted
        status, refusal = http_generate(llm_server.http_url, name, {**inputs, "speculative_method": "eagle"})
        assert status == 400 and "loaded: ngram" in refusal["error"]
        metrics = llm_server.metrics()
    first = {
        kind: sum(
            value
            for name, value in metrics.items()
            if name.startswith(f"slipstream_spec_position_{kind}_total{{")
            and 'method="ngram"' in name
            and 'position="1"' in name
        )
        for kind in ("drafted", "accepted")
    }
    assert 0 < first["accepted"] <= first["drafted"]
