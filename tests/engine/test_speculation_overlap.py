"""Drafts that pause and resume under load, beside requests that run ahead: one step verifies some, continues others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_driver import GREEDY, make_engine, run_all
from slipstream.core.config import SpeculationConfig

OFF = replace(GREEDY, max_tokens=60, num_draft_tokens=0)
BESIDE = {
    "repetition": replace(OFF, repetition_penalty=1.2),
    "frequency": replace(OFF, frequency_penalty=0.5, presence_penalty=0.2),
    "sampled": replace(OFF, temperature=0.8, top_p=0.9, seed=3),
}


TEXT = "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return a + b\n"


@pytest.mark.parametrize("beside", sorted(BESIDE))
def test_text_is_that_of_plain_decoding(demo_model: Path, beside: str) -> None:
    """Six requests are too many for drafts; when four have ended, one drafts and the other is still a step ahead."""
    plain = make_engine(demo_model)
    ids = plain.tokenizer.encode(TEXT)
    prompts = [ids, ids[:-3], *(ids[: 10 + i] for i in range(4))]
    params = [replace(GREEDY, max_tokens=60), BESIDE[beside], *[replace(GREEDY, max_tokens=10)] * 4]
    expected = [told.token_ids for told in run_all(plain, prompts, params)]
    engine = make_engine(
        demo_model,
        scheduler={"overlap_scheduling": "on"},
        speculation=SpeculationConfig(methods="ngram", throttle="auto", free_tokens=8),
    )
    told = run_all(engine, prompts, params)
    assert [one.token_ids for one in told] == expected
