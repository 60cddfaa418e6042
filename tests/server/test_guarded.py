"""The gateway before the real `guarded` model: what it declares is all that is asked of it.

Without its encoders it can judge nothing, which needs no checkpoint of an encoder: closed it blocks, open it passes on.
"""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from gateway import GatewayProcess
from llm_server import LlmServer


@pytest.fixture(scope="module")
def guarded(llm_server: LlmServer) -> Iterator[openai.OpenAI]:
    """A client of a gateway that takes the template of the guarded LLM; the models are loaded by the tests."""
    with GatewayProcess(llm_server.grpc_url, []) as running:
        yield openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0, timeout=120)


def ask(client: openai.OpenAI, model: str, **options: object) -> object:
    messages = [{"role": "user", "content": "def add(a, b):"}]
    options = {"temperature": 0, "max_tokens": 8, **options}
    return client.chat.completions.create(model=model, messages=messages, **options)


def load(server: LlmServer, policy: str) -> None:
    path = server.repository / "guarded/config.pbtxt"
    assert "on_encoder_failure" in path.read_text()
    text = path.read_text()
    for other in ("open", "closed"):
        text = text.replace(f'string_value: "{other}"', f'string_value: "{policy}"')
    path.write_text(text)
    status, body = server.load("guarded")
    assert status == 200, body.decode()


def test_what_cannot_be_judged_is_blocked_or_passed_on(llm_server: LlmServer, guarded: openai.OpenAI) -> None:
    try:
        load(llm_server, "closed")
        answer = ask(guarded, "guarded")
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "content_filter")
        assert answer.safety == {"flagged": True, "reason": "encoder_failure", "categories": []}
        assert answer.usage.total_tokens == 0, "the LLM has not seen it"
        load(llm_server, "open")
        plain = ask(guarded, "llm")
        expected = plain.choices[0]
        answer = ask(guarded, "guarded")
        counts = plain.usage.prompt_tokens, plain.usage.completion_tokens
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == counts and counts[1] == 8
        assert answer.choices[0].message.content == expected.message.content and not hasattr(answer, "safety")
        chunks = list(ask(guarded, "guarded", stream=True, stream_options={"include_usage": True}))
        *chunks, last = chunks
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.message.content
        assert chunks[-1].choices[0].finish_reason == expected.finish_reason == "length"
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == counts
    finally:
        llm_server.unload("guarded")
