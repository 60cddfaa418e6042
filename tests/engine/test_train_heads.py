"""build/train_heads.py: what it trains is what the engine drafts with, and a training goes on where it was cut off."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_driver import make_engine
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from speculation_config import speculation_config
from tiny_model import make_tiny_llama

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build"))

from draft_heads.export import best_choices, export
from draft_heads.train import HeadsConfig, summary, train

FOLDERS = {"medusa": "medusa_heads", "mtp": "mtp_module", "eagle": "eagle_head"}
TEXT = np.random.default_rng(0).integers(3, 420, 3000).astype(np.uint16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("teacher"), num_layers=8)


def config(kind: str, model: Path, out: Path, **options: object) -> HeadsConfig:
    sizes = {"batch_windows": 2, "window_tokens": 32, "eval_windows": 4, "num_heads": 3, "num_steps": 3}
    settings = {"max_steps": 4, "max_seconds": 6e4, **sizes, **options}  # steps end it: the rate falls with either
    out.mkdir(parents=True, exist_ok=True)
    return HeadsConfig(kind, model, out, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_engine_drafts_what_the_trained_head_guesses(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # in float32, as the engine computes here: a GPU trains in bf16, and guesses of a head of four steps are near ties
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trainer = train(config(kind, model, tmp_path / kind, draft_vocab_size=200), TEXT, TEXT[:600])
    record = summary(trainer)
    assert record["steps"] == 4 and len(record["given_right"]) == 3
    folder = tmp_path / kind
    export(trainer.head, record, folder, model)
    speculation = speculation_config(
        kind,
        throttle="off",
        num_draft_tokens=3,
        eagle_top_k=1,
        medusa_choices="{0},{0,0},{0,0,0}",
        **{FOLDERS[kind]: str(folder)},
    )
    engine = make_engine(model, speculation=speculation)
    request = Request(
        [int(token) for token in TEXT[:20]], SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    )
    engine.submit(request)
    while not request.num_output_tokens:
        engine.step()
    assert request.num_output_tokens == 1 and len(request.draft_token_ids) == 3
    tokens = torch.tensor([request.token_ids])
    with torch.no_grad():
        for weight in trainer.head.parameters():  # as exported: after four steps guesses are near ties
            weight.copy_(weight.bfloat16())
        found = [logits[0, 19].argmax() for logits in trainer.head(trainer.teacher.read(tokens), 1)]
    first = int(found[0])
    if kind == "eagle":
        first = int(trainer.head.vocabulary[first])  # type: ignore[union-attr,index]
    # row 19 guesses from the token after it, which the engine has just drawn
    assert request.draft_token_ids[0] == first


def test_a_training_goes_on(model: Path, tmp_path: Path) -> None:
    """The state is saved half-way; a second training with a larger limit begins there."""
    state = tmp_path / "state.pt"
    first = train(config("medusa", model, tmp_path / "a", state_path=state), TEXT, TEXT[:600])
    again = train(config("medusa", model, tmp_path / "b", state_path=state, max_steps=8), TEXT, TEXT[:600])
    assert state.exists() and first.step == 4 and again.step == 8
    assert len(again.history) < 8


def test_the_best_tree_grows_by_its_best_leaf() -> None:
    ranks = [[0.6, 0.2, 0.05], [0.5, 0.3], [0.4]]
    assert best_choices(ranks, 6) == [[0], [0, 0], [1], [0, 1], [0, 0, 0], [1, 0]]
    assert best_choices(ranks, 100)[-1] != best_choices(ranks, 100)[0]
