"""Positions around 196,608 on a tiny random model: against Hugging Face, and whole = chunks = prefix hit.

The context is random keys and values, as computing it would take minutes: every step attends to all of it.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from paged_forward import PagedForward
from registered_prefix import register_prefix
from slipstream import LLM, SamplingParams
from slipstream.core.config import ModelConfig
from slipstream.nn.load import load_model
from tiny_checkpoints import TinyCheckpoint, make_checkpoint, relative_error
from tiny_variants import VOCAB_SIZE
from transformers import DynamicCache

LONG, BLOCK = 196_608, 64
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 6.0, "original_max_position_embeddings": 32768}
SIZES = {"max_position_embeddings": LONG, "rope_parameters": YARN, "num_hidden_layers": 2, "num_key_value_heads": 1}
TOKENIZER = str(Path(__file__).resolve().parents[2] / "models/slipstream-demo-code")  # an engine wants one
NUM_NEW = 40  # computed tokens: the last ones that the model serves


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint("llama2-mha", tmp_path_factory.mktemp("long"), **SIZES)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    dice = random.Random(5)
    return [dice.randrange(3, VOCAB_SIZE) for _ in range(LONG)]


def behind_a_context(checkpoint: TinyCheckpoint, prompt: list[int]) -> PagedForward:
    """All but NUM_NEW tokens have random keys and values in shuffled blocks, the same each time."""
    forward = PagedForward(load_model(ModelConfig(model=str(checkpoint.path), device="cpu")), [prompt], BLOCK)
    forward.num_computed_tokens = [LONG - NUM_NEW]
    generator = torch.Generator().manual_seed(3)
    for cache in forward.kv_caches:
        for tensor in (cache.key, cache.value):
            tensor.normal_(generator=generator)
    return forward


def context_of(forward: PagedForward) -> DynamicCache:
    """The same keys and values in order, for Hugging Face."""
    context = DynamicCache()
    for layer, cache in enumerate(forward.kv_caches):
        rows = (plane[forward.block_ids[0]].transpose(0, 1).flatten(1, 2) for plane in (cache.key, cache.value))
        key, value = (row[None, :, : LONG - NUM_NEW].clone() for row in rows)
        context.update(key, value, layer)
    return context


def test_logits_at_the_last_positions_are_hugging_face_s(checkpoint: TinyCheckpoint, prompt: list[int]) -> None:
    forward = behind_a_context(checkpoint, prompt)
    positions = torch.arange(LONG - NUM_NEW, LONG)[None]
    with torch.no_grad():
        theirs = checkpoint.model(
            torch.tensor([prompt[-NUM_NEW:]]), past_key_values=context_of(forward), position_ids=positions
        ).logits[0]
    whole = forward.run([NUM_NEW])[0]
    assert relative_error(whole, theirs) <= 1e-4
    for chunks in ([23, 17], [1] * 8 + [32]):
        assert relative_error(behind_a_context(checkpoint, prompt).run(chunks)[0], theirs) <= 1e-4


def test_the_engine_gives_one_text_whole_in_chunks_and_after_a_hit(
    checkpoint: TinyCheckpoint, prompt: list[int]
) -> None:
    """The prompt's last 200 tokens are computed, and then decodes up to the last position."""
    num_output, num_cached = 12, (LONG - 250) // BLOCK * BLOCK
    asked = prompt[: LONG - num_output]
    texts = []
    for budget in (4096, 100):
        settings = {"max_num_batched_tokens": budget, "num_blocks": LONG // BLOCK + 8}
        with LLM(str(checkpoint.path), device="cpu", tokenizer=TOKENIZER, **settings) as llm:
            generator = torch.Generator().manual_seed(3)
            for cache in llm.engine.worker.runner._kv_caches:
                for tensor in (cache.key, cache.value):
                    tensor.normal_(generator=generator)
            register_prefix(llm.engine.scheduler.cache, asked[:num_cached])
            for cached in (num_cached, (len(asked) - 1) // BLOCK * BLOCK):
                [found] = llm.generate([asked], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
                assert found.num_cached_tokens == cached and found.finish_reason == "length"
                texts.append(found.token_ids)
    assert len(texts[0]) == num_output and texts == [texts[0]] * 4
