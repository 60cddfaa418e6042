"""The checkpoint of the repository through the engine: Hugging Face's greedy text, and JSON when JSON is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_texts import greedy_continuation
from slipstream import LLM, Guide, SamplingParams
from transformers import AutoModelForCausalLM

PROMPTS = ["def read_file(path):\n", "import os\n\n\nclass Stack:\n    def __init__(self", "for i in range("]


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    with LLM(str(demo_model), device="cpu", num_blocks=64) as llm:
        yield llm


def test_greedy_is_huggingface(llm: LLM, demo_model: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    for completion in llm.generate(PROMPTS, SamplingParams(max_tokens=40, temperature=0.0)):
        assert completion.token_ids == greedy_continuation(reference, completion.prompt_token_ids, max_tokens=40)
        assert completion.text.strip()


def test_stream_joins_to_the_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, seed=7, temperature=0.8, top_p=0.9)
    pieces = list(llm.stream(PROMPTS[0], params))
    assert "".join(piece.text for piece in pieces) == llm.generate(PROMPTS[0], params)[0].text
    assert len(pieces) > 20


def test_guided_json(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=150, n=4, seed=1, guide=Guide("json_schema", json.dumps(schema)))
    completions = llm.generate("# a record as JSON\n", params)
    ended = [completion for completion in completions if completion.finish_reason == "stop"]
    assert ended
    for completion in ended:
        assert set(json.loads(completion.text)) == {"name", "size"}
