"""A draft model of another tokenizer: tokens are mapped by their text, what it lacks it never drafts, answers stay."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from engine_driver import make_engine, run_all, run_steps
from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.worker.spec_decode.vocabulary import VocabularyMap
from speculation_config import speculation_config
from tiny_model import make_tiny_llama
from transformers import LlamaForCausalLM

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, seed=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), num_layers=3)


def respelled(model: Path, folder: Path, share: float) -> tuple[Path, dict[int, int]]:
    """The model itself with its tokens in another order, and only a share of their texts kept. Returns the token of
    the copy for each of the model's that it knows."""
    make_tiny_llama(folder, num_layers=3)
    stored = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = stored["model"]["vocab"]
    dice = random.Random(0)
    places = list(vocabulary.values())
    dice.shuffle(places)
    left_out = set(dice.sample(sorted(vocabulary), round((1 - share) * len(vocabulary))))
    kept = {text: place for text, place in zip(vocabulary, places) if text not in left_out}
    renamed = {f"another{number}": place for number, place in enumerate(set(places) - set(kept.values()))}
    stored["model"]["vocab"], stored["model"]["merges"] = kept | renamed, []
    added = {token["content"] for token in stored["added_tokens"]}
    stored["added_tokens"] = [token for token in stored["added_tokens"] if token["content"] not in vocabulary]
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    own = {place: kept[text] for text, place in vocabulary.items() if text in kept}
    own |= {token["id"]: token["id"] for token in stored["added_tokens"] if token["content"] in added}
    twin = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    order = torch.arange(twin.config.vocab_size)
    order[list(own.values())] = torch.tensor(list(own))
    with torch.no_grad():
        for table in (twin.model.embed_tokens, twin.lm_head):
            table.weight.copy_(table.weight[order].clone())
    twin.save_pretrained(folder)
    return folder, own


def test_tokens_are_mapped_by_text(model: Path, tmp_path: Path) -> None:
    draft, own = respelled(model, tmp_path, share=0.8)
    size = LlamaForCausalLM.from_pretrained(model).config.vocab_size
    words = VocabularyMap.between(ModelConfig(str(model)), ModelConfig(str(draft)), size, size, CPU)
    known = torch.tensor(list(own))
    assert words.to_draft(known).tolist() == list(own.values())
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    mapped = words.logits(logits)
    assert mapped.shape == (3, size)
    assert torch.equal(mapped[:, known], logits[:, list(own.values())])
    lacking = [token for token in range(size) if token not in own]
    assert lacking and torch.isneginf(mapped[:, lacking]).all()


def test_a_draft_of_another_tokenizer_is_right_where_it_knows_the_words(model: Path, tmp_path: Path) -> None:
    """The model itself, its words respelled: every draft is taken, but for answers with words that it lacks."""
    draft, own = respelled(model, tmp_path, share=0.9)
    engine = make_engine(
        model, speculation=speculation_config("draft_model", throttle="off", draft_model=str(draft), num_draft_tokens=3)
    )
    dice = random.Random(3)
    prompts = [[dice.choice(list(own)) for _ in range(12)] for _ in range(4)]
    plain = make_engine(model)
    for params in (GREEDY, SAMPLED):
        expected = [told.token_ids for told in run_all(plain, prompts, params)]
        requests = [Request(list(prompt), params) for prompt in prompts]
        for request in requests:
            engine.submit(request)
        drafted: set[int] = set()
        while engine.has_work:
            engine.step()
            drafted |= {token for request in requests for token in request.draft_token_ids}
        assert [request.output_token_ids for request in requests] == expected
        assert drafted <= set(own)
        if params is GREEDY:
            assert sum(request.num_accepted_tokens for request in requests) > 12


def test_a_draft_that_knows_too_few_words_is_refused(model: Path, tmp_path: Path) -> None:
    draft, _ = respelled(model, tmp_path, share=0.4)
    with pytest.raises(ConfigError, match=r"draft_model=.* has 4.% of the model's tokens; accepted: 50% or more"):
        make_engine(model, speculation=speculation_config("draft_model", draft_model=str(draft)))


def test_words_that_the_draft_has_no_row_for_are_not_its_own(model: Path, tmp_path: Path) -> None:
    """A tokenizer may have more tokens than its model has rows."""
    draft, own = respelled(model, tmp_path, share=0.9)
    size = LlamaForCausalLM.from_pretrained(model).config.vocab_size
    rows = 350
    words = VocabularyMap.between(ModelConfig(str(model)), ModelConfig(str(draft)), size, rows, CPU)
    mapped = words.logits(torch.zeros(1, rows))[0]
    assert int(words.to_draft(torch.arange(size)).max()) < rows
    assert all(bool(mapped[token] == 0) is (place < rows) for token, place in own.items())


@pytest.mark.parametrize("spare", [-7, 9])
def test_models_of_one_tokenizer_may_have_unused_rows(model: Path, tmp_path: Path, spare: int) -> None:
    """As Qwen2.5's sizes have: the model may even say a token that its draft has no row for."""
    make_tiny_llama(tmp_path, num_layers=3)
    twin = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    size = twin.config.vocab_size
    twin.resize_token_embeddings(size + spare)
    twin.save_pretrained(tmp_path)
    engine = make_engine(
        model, speculation=speculation_config("draft_model", throttle="off", draft_model=str(tmp_path))
    )
    bias = ((size - 1, 100.0), (size - 2, 99.0))  # spare rows of the model, said again and again
    for params in (GREEDY, SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logit_bias=bias)):
        prompt = [*range(40, 60)]
        (expected,) = run_all(make_engine(model), [prompt], params)
        request = Request(list(prompt), params)
        engine.submit(request)
        run_steps(engine, {})
        assert engine.error is None and request.output_token_ids == expected.token_ids
        assert request.num_drafted_tokens > 0


def test_a_draft_without_a_tokenizer_has_the_models(model: Path, tmp_path: Path) -> None:
    """Such a draft may be of a few megabytes, of which a tokenizer would be the most."""
    make_tiny_llama(tmp_path, num_layers=3)
    LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).save_pretrained(tmp_path)
    for file in tmp_path.glob("*token*"):
        file.unlink()
    engine = make_engine(
        model, speculation=speculation_config("draft_model", throttle="off", draft_model=str(tmp_path))
    )
    prompt = [*range(40, 60)]
    (expected,) = run_all(make_engine(model), [prompt], GREEDY)
    request = Request(list(prompt), GREEDY)
    engine.submit(request)
    run_steps(engine, {})
    assert engine.error is None and request.output_token_ids == expected.token_ids
    assert request.num_accepted_tokens == request.num_drafted_tokens > 0  # it is the model itself
