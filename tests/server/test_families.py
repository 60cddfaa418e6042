"""Every family behind the gateway and the real server: a chat and a completion are Hugging Face's `generate`.

The chat names no sampling at all: greedy decoding, its penalty and its length are from generation_config.json.

Tiny random weights in fp32, the family's role markers and template (tests/support/chat_families.py). CI serves the
families of IN_CI, which have every template's kind and every part of the maths; all with SLIPSTREAM_LONG_TESTS=1.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import openai
import pytest
from chat_families import FAMILIES, GREEDY, MESSAGES, PROMPT, make_family
from llm_client import http_generate
from llm_server import LlmServer
from tiny_variants import CLASSES, VARIANTS

PARAMETERS = {"device": "cpu", "num_blocks": 64, "max_num_seqs": 4}
IN_CI = (
    "llama-2", "qwen3", "qwen3-moe", "mistral-small-3.1", "minimax-m2", "gpt-oss", "glm-4-0414", "chatglm3", "glm-4.5",
    "gemma-3", "phi-4", "granite-3", "olmo-3", "baichuan-13b", "deepseek-r1",
)  # fmt: skip
SERVED = FAMILIES if os.environ.get("SLIPSTREAM_LONG_TESTS") == "1" else IN_CI


def test_the_long_test_serves_every_architecture() -> None:
    assert {VARIANTS[family.variant][0] for family in FAMILIES.values()} == set(CLASSES)


@pytest.mark.parametrize("family", SERVED)
def test_a_chat_and_a_completion(family: str, tmp_path: Path, llm_server: LlmServer, client: openai.OpenAI) -> None:
    made = make_family(family, tmp_path)
    with llm_server.variant(f"family-{family}", PARAMETERS, made.path) as model:
        [choice] = client.chat.completions.create(model=model, messages=MESSAGES, extra_body=made.settings).choices
        body = {"text_input": PROMPT, "exclude_input_in_output": True, "return_finish_reason": True}
        body["sampling_parameters"] = json.dumps({**GREEDY, **made.settings})
        status, reply = http_generate(llm_server.http_url, model, body)
    assert choice.message.content == made.chat.text
    assert choice.finish_reason == ("stop" if made.chat.is_ended else "length")
    assert status == 200, reply
    assert reply["text_output"] == made.completion.text
    assert reply["finish_reason"] == ("stop" if made.completion.is_ended else "length")
