"""The drafters of models/ for SmolLM2-135M-Instruct: each has drafts accepted, and the text is as without them.

`.venv/bin/python build/chat_model.py` fetches the model; without it these tests are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slipstream import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "install/models/SmolLM2-135M-Instruct"
DRAFTERS = {
    "eagle": ("eagle_head", "smollm2-135m-eagle"),
    "mtp": ("mtp_module", "smollm2-135m-mtp"),
    "medusa": ("medusa_heads", "smollm2-135m-medusa"),
    "draft_model": ("draft_model", "smollm2-135m-draft"),
}
PROMPT = "<|im_start|>user\nExplain photosynthesis to a child.<|im_end|>\n<|im_start|>assistant\n"

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="no chat model: run `.venv/bin/python build/chat_model.py`")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """One engine with all four; a request chooses."""
    heads = {parameter: str(ROOT / "models" / folder) for parameter, folder in DRAFTERS.values()}
    with LLM(
        str(FOLDER),
        device="cpu",
        dtype="float32",
        num_blocks=64,
        max_model_len=1024,
        speculative_method=",".join(DRAFTERS),
        **heads,
    ) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[int]:
    return answer(llm, "none")[0]


def answer(llm: LLM, method: str) -> tuple[list[int], int]:
    """The greedy answer's tokens, and how many of them were accepted drafts."""
    params = SamplingParams(max_tokens=32, temperature=0.0, speculative_method=method)
    pieces = list(llm.stream(PROMPT, params))
    return [token for piece in pieces for token in piece.token_ids], pieces[-1].request.num_accepted_tokens


@pytest.mark.parametrize("method", DRAFTERS)
def test_the_text_is_as_without_drafts_and_some_are_accepted(llm: LLM, plain: list[int], method: str) -> None:
    token_ids, num_accepted = answer(llm, method)
    assert token_ids == plain and len(plain) > 16
    assert num_accepted >= 3, "drafts of a head that does not fit the model are hardly ever right"
