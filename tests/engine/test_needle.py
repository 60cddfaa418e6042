"""Retrieval from a long text by SmolLM2-135M-Instruct: whole, in chunks, after a prefix hit, with an FP8 cache.

`build/needle.py` does the same with any server, at any length. Here 400 tokens, which two cores compute in seconds;
SLIPSTREAM_LONG_TESTS=1 takes 4,096, as a model of this size finds nothing at its own 8,192.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from slipstream import LLM, SamplingParams
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build"))
from chat_model import chat_model
from needle_grid import Cell, Grid

LENGTH = 4096 if os.environ.get("SLIPSTREAM_LONG_TESTS") == "1" else 400
DEPTHS = (10, 60)
GREEDY = SamplingParams(max_tokens=14, temperature=0.0)
HAYSTACK = " ".join(
    f"The {day}th day of the voyage was {sky}, and the crew {work} until the evening bell rang."
    for day, sky, work in zip(
        range(4, 400),
        ("grey and calm", "bright with a steady wind", "wet and cold", "too warm for work at noon") * 100,
        ("mended the sails", "cleaned the deck", "sang old songs", "counted the water barrels", "played cards") * 100,
    )
)


@pytest.fixture(scope="module")
def model() -> Path:
    """Fetched once, some 93 MB."""
    try:
        return chat_model()
    except OSError as error:
        pytest.skip(f"no chat model: {error}")


@pytest.fixture(scope="module")
def cells(model: Path) -> list[Cell]:
    return list(Grid(HAYSTACK, AutoTokenizer.from_pretrained(model), is_chat=True).cells([LENGTH], DEPTHS))


def answers(model: Path, cells: list[Cell], budget: int, num_times: int = 1, **settings: object) -> list[list[str]]:
    """The cells' texts, each time that they are asked for."""
    settings = {"device": "cpu", "max_model_len": LENGTH, "num_blocks": LENGTH // 16, **settings}
    texts = []
    with LLM(str(model), max_num_batched_tokens=budget, **settings) as llm:
        for time in range(num_times):
            found = llm.generate([cell.prompt for cell in cells], GREEDY)
            assert all((one.num_cached_tokens > LENGTH - 150) == (time > 0) for one in found)
            texts.append([one.text for one in found])
    return texts


def test_needles_are_found_alike_in_chunks_and_after_a_hit(model: Path, cells: list[Cell]) -> None:
    whole, hit = answers(model, cells, LENGTH, num_times=2)
    (chunks,) = answers(model, cells, 150)
    assert [cell.score(text) for cell, text in zip(cells, whole)] == [1, 1], whole
    assert whole == hit == chunks


def test_needles_are_found_with_an_fp8_cache(model: Path, cells: list[Cell]) -> None:
    """Numbers, not texts: where chunks change the last bit of a key, e4m3 may round it to its other neighbour."""
    for texts in answers(model, cells, 150, num_times=2, kv_cache_dtype="fp8_e4m3"):
        assert [cell.score(text) for cell, text in zip(cells, texts)] == [1, 1], texts
