"""What each type of KV cache costs the demo model: perplexity of a snippet, and its greedy text."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from slipstream import LLM, SamplingParams

# Written for this test. 300 tokens are few, so the bounds are loose; figures of more text: docs/quantization.md.
SNIPPET = '''\
def read_settings(path, defaults=None):
    """Return the settings stored in a file, with defaults for missing keys."""
    settings = dict(defaults or {})
    with open(path) as stream:
        for number, line in enumerate(stream, 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, separator, value = line.partition("=")
            if not separator:
                raise ValueError("line %d: expected name=value" % number)
            settings[name.strip()] = value.strip()
    return settings


class Counter:
    def __init__(self):
        self.counts = {}

    def add(self, key, amount=1):
        self.counts[key] = self.counts.get(key, 0) + amount

    def most_common(self, limit):
        items = sorted(self.counts.items(), key=lambda item: item[1], reverse=True)
        return items[:limit]
'''
PROMPT = "import os\n\n\nclass Stack:\n    def __init__(self"
# Largest relative change of the perplexity of SNIPPET.
BOUNDS = {"fp8_e4m3": 0.01, "int8": 0.005, "int4": 0.1}


def measure(demo_model: Path, kv_type: str) -> tuple[float, str]:
    with LLM(str(demo_model), device="cpu", num_blocks=64, kv_cache_dtype=kv_type) as llm:
        (scored,) = llm.generate(SNIPPET, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        (text,) = llm.generate(PROMPT, SamplingParams(max_tokens=24, temperature=0.0))
    logprobs = [entry.logprob for entry in scored.prompt_logprobs if entry is not None]
    assert len(logprobs) > 250
    return math.exp(-sum(logprobs) / len(logprobs)), text.text


@pytest.fixture(scope="module")
def plain(demo_model: Path) -> tuple[float, str]:
    return measure(demo_model, "auto")


@pytest.mark.parametrize("kv_type", BOUNDS)
def test_cost(demo_model: Path, plain: tuple[float, str], kv_type: str) -> None:
    perplexity, text = measure(demo_model, kv_type)
    assert 0 < abs(perplexity / plain[0] - 1) < BOUNDS[kv_type]
    if kv_type == "int8":
        assert text == plain[1]
