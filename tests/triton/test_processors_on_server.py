"""Logits processors through the real server: a class of the model's folder, and one that comes with the project."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway import GatewayProcess
from llm_client import http_generate
from llm_server import LlmServer

PROMPT = "def fibonacci(n):\n"
FORCED = [{"name": "force", "kwargs": {"token": 40}}]


def ask(server: LlmServer, **body: Any) -> tuple[int, dict[str, Any]]:
    fixed = {"text_input": PROMPT, "exclude_input_in_output": True, "max_tokens": 8, "temperature": 0.0}
    return http_generate(server.http_url, "llm", {**fixed, "ignore_eos": True, **body})


def test_over_triton(llm_server: LlmServer) -> None:
    status, reply = ask(llm_server, logits_processors=json.dumps(FORCED), return_output_ids=True)
    assert status == 200 and reply["output_ids"] == [40] * 8
    in_json = ask(llm_server, sampling_parameters=json.dumps({"logits_processors": FORCED}))
    assert in_json[1]["text_output"] == reply["text_output"] != ask(llm_server)[1]["text_output"]
    status, reply = ask(llm_server, logits_post_processor_name="other")
    assert status == 400 and "the model serves: NoRepeatNgram, force" in reply["error"]
    status, reply = ask(llm_server, logits_post_processor_name="force")
    assert status == 400 and "force refuses {}: `token` is missing" in reply["error"]


def test_one_that_fails_is_internal_and_the_server_goes_on(llm_server: LlmServer) -> None:
    failing = [{"name": "force", "kwargs": {"token": 40, "fail_after": 2}}]
    status, reply = ask(llm_server, logits_processors=json.dumps(failing))
    assert status >= 400 and "the logits processor force failed: RuntimeError [INTERNAL]" in reply["error"]
    assert "tells of" not in reply["error"]
    assert ask(llm_server)[0] == 200
    assert llm_server.settled("slipstream_logits_processor_seconds_count") > 0


def test_through_the_gateway(llm_server: LlmServer) -> None:
    openai = pytest.importorskip("openai")
    with GatewayProcess(llm_server.grpc_url, []) as gateway:
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=120)

        def complete(processors: list[Any]) -> str:
            extra = {"logits_processors": processors, "ignore_eos": True}
            made = client.completions.create(model="llm", prompt=PROMPT, max_tokens=8, temperature=0, extra_body=extra)
            text: str = made.choices[0].text
            return text

        assert complete(FORCED) == ask(llm_server, logits_processors=json.dumps(FORCED))[1]["text_output"]
        assert complete([]) == ask(llm_server)[1]["text_output"]
        with pytest.raises(openai.BadRequestError, match="the model serves: NoRepeatNgram, force"):
            complete(["other"])
