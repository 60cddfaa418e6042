"""Every family behind the gateway and the real server: a chat and a completion are Hugging Face's `generate`.

The chat names no sampling at all: greedy decoding, its penalty and its length are from generation_config.json.

Tiny random weights in fp32, the family's role markers and template (tests/support/chat_families.py). CI serves one
model of each architecture; the others, which differ in template or layers, with SLIPSTREAM_LONG_TESTS=1.
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
from tiny_checkpoints import VARIANTS

PARAMETERS = {"device": "cpu", "num_blocks": 16, "max_num_seqs": 4}
ONE_OF_EACH = {VARIANTS[family.variant][0]: name for name, family in reversed(FAMILIES.items())}
SERVED = FAMILIES if os.environ.get("SLIPSTREAM_LONG_TESTS") == "1" else ONE_OF_EACH.values()


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
