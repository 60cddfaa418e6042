"""build/train_heads.py: what it trains is what the engine drafts with, and a training goes on where it was cut off.

build/generate_texts.py: the model writes conversations that the training reads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_driver import make_engine
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from speculation_config import speculation_config
from tiny_checkpoints import make_checkpoint
from tiny_model import make_tiny_llama

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build"))

import generate_texts
from demo_model.train import Windows
from draft_heads.export import best_choices, export
from draft_heads.kinds import HeadsConfig
from draft_heads.text import Text, line_text
from draft_heads.train import summary, train

FOLDERS = {"medusa": "medusa_heads", "mtp": "mtp_module", "eagle": "eagle_head", "draft": "draft_model"}
METHODS = {"draft": "draft_model"}  # where it has another name than the kind
TEXT = Text(np.random.default_rng(0).integers(3, 420, 3000).astype(np.uint16))
HELD_OUT = Text(TEXT.ids[:600])
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("teacher"), num_layers=8)


def config(kind: str, model: Path, out: Path, **options: object) -> HeadsConfig:
    sizes = {"batch_windows": 2, "window_tokens": 32, "eval_windows": 4, "num_heads": 3, "num_steps": 3}
    sizes |= {"hidden_size": 64, "num_layers": 1}
    settings = {"max_steps": 4, "max_seconds": 6e4, **sizes, **options}  # steps end it: the rate falls with either
    out.mkdir(parents=True, exist_ok=True)
    return HeadsConfig(kind, model, out, **settings)  # type: ignore[arg-type]


def test_an_mtp_module_with_latent_attention_is_refused(tmp_path: Path) -> None:
    make_checkpoint("deepseek-v2-lite", tmp_path)
    with pytest.raises(ValueError, match=r"mtp: .*train eagle or medusa"):
        train(config("mtp", tmp_path, tmp_path / "mtp"), TEXT, HELD_OUT)


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_engine_drafts_what_the_trained_head_guesses(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # in float32, as the engine computes here: a GPU trains in bf16, and guesses of a head of four steps are near ties
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wanted = config(kind, model, tmp_path / kind, draft_vocab_size=200, intermediate_size=96)
    trainer = train(wanted, TEXT, HELD_OUT)
    record = summary(trainer)
    assert record["steps"] == 4 and len(record["given_right"]) == wanted.num_positions
    folder = tmp_path / kind
    export(trainer.head, record, folder, model)
    speculation = speculation_config(
        METHODS.get(kind, kind),
        throttle="off",
        num_draft_tokens=3,
        eagle_top_k=1,
        medusa_choices="{0},{0,0},{0,0,0}",
        **{FOLDERS[kind]: str(folder)},
    )
    engine = make_engine(model, speculation=speculation)
    request = Request(
        [int(token) for token in TEXT.ids[:20]], SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
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
    if trainer.head.vocabulary is not None:
        first = int(trainer.head.vocabulary[first])
    # row 19 guesses from the token after it, which the engine has just drawn
    assert request.draft_token_ids[0] == first


def test_a_training_goes_on(model: Path, tmp_path: Path) -> None:
    """The state is saved half-way; a second training with a larger limit begins there."""
    state = tmp_path / "state.pt"
    first = train(config("medusa", model, tmp_path / "a", state_path=state), TEXT, HELD_OUT)
    again = train(config("medusa", model, tmp_path / "b", state_path=state, max_steps=8), TEXT, HELD_OUT)
    assert state.exists() and first.step == 4 and again.step == 8
    assert len(again.history) < 8


def test_windows_of_a_large_vocabulary_begin_with_texts() -> None:
    """Token ids past 32,767 were read as negative ones."""
    texts = [[49_000 + place] * 40 for place in range(5)]
    text = Text.of(texts)
    windows = Windows(text.ids, 48, CPU, 0, text.starts)
    assert windows.starts.tolist() == [0, 40, 80, 120]  # from the last, no window fits
    inputs, targets = windows.at(windows.starts)
    assert inputs[:, 0].tolist() == [49_000, 49_001, 49_002, 49_003]
    assert inputs[:, 40:].unique(dim=1).flatten().tolist() == [49_001, 49_002, 49_003, 49_004]
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    with pytest.raises(ValueError, match="the text has 200 tokens: too few for windows of 512"):
        Windows(text.ids, 512, CPU, 0, text.starts)


def test_the_model_writes_text_that_heads_learn_from(model: Path, tmp_path: Path) -> None:
    document, out = tmp_path / "document.txt", tmp_path / "texts.jsonl"
    document.write_text("\n\n".join(f"Paragraph {number} says the same." for number in range(60)))
    sizes = "--num-questions 6 --num-passages 4 --passage-characters 40 --max-tokens 12 --greedy-share 0.5"
    engine = "--set device=cpu dtype=float32 num_blocks=64 max_num_seqs=8"
    generate_texts.main(f"--model {model} --out {out} --documents {document} {sizes} {engine}".split())
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) >= 4 and {record["temperature"] for record in records} <= {0.0, 0.8}
    for record in records:
        assert 0 < record["num_prompt_tokens"] < len(record["token_ids"]) <= record["num_prompt_tokens"] + 12
    training, held_out = line_text(out, model)
    assert held_out.ids.tolist() == records[-1]["token_ids"]
    assert len(training.ids) + len(held_out.ids) == sum(len(record["token_ids"]) for record in records)
    assert training.starts is not None and len(training.starts) == len(records) - 1


def test_the_best_tree_grows_by_its_best_leaf() -> None:
    ranks = [[0.6, 0.2, 0.05], [0.5, 0.3], [0.4]]
    assert best_choices(ranks, 6) == [[0], [0, 0], [1], [0, 1], [0, 0, 0], [1, 0]]
    assert best_choices(ranks, 100)[-1] != best_choices(ranks, 100)[0]
