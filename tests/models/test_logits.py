"""Every family computes Hugging Face's logits: whole, in chunks, token by token, and several requests in one batch."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from paged_forward import PagedForward
from slipstream.core.config import ModelConfig
from slipstream.nn.attention.split_kv import SplitKVAttention, SplitKVFp8Attention
from slipstream.nn.decoder import Decoder
from slipstream.nn.load import load_model
from slipstream_kernels import ops
from tiny_checkpoints import TinyCheckpoint, make_checkpoint, relative_error
from tiny_variants import MAX_POSITIONS, VARIANTS, VOCAB_SIZE
from transformers import DynamicCache

TOLERANCE = {torch.float32: 1e-4}
LENGTHS = (41, 17, 1, 28)
NEW_IN_TRANSFORMERS = ("gpt-oss", "minimax-m2")  # their experts are computed otherwise before PINNED
PINNED = Version("5.23")


def prompts() -> list[list[int]]:
    generator = random.Random(7)
    return [[generator.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module", params=list(VARIANTS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyCheckpoint, Decoder]:
    if request.param in NEW_IN_TRANSFORMERS and Version(transformers.__version__) < PINNED:
        pytest.skip(f"transformers {transformers.__version__} computes these experts otherwise; {PINNED} is pinned")
    checkpoint = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    return checkpoint, load_model(ModelConfig(model=str(checkpoint.path), device="cpu"))


def assert_equal_to_reference(checkpoint: TinyCheckpoint, ours: list[torch.Tensor]) -> None:
    for prompt, logits in zip(prompts(), ours):
        assert relative_error(logits, checkpoint.logits(prompt)) <= TOLERANCE[torch.float32]


def test_one_request_in_one_pass(served: tuple[TinyCheckpoint, Decoder]) -> None:
    checkpoint, decoder = served
    prompt = prompts()[0]
    (ours,) = PagedForward(decoder, [prompt]).run([len(prompt)])
    assert ours.dtype == torch.float32
    assert relative_error(ours, checkpoint.logits(prompt)) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("chunk_sizes", [[1], [5, 1, 7], [64]], ids=["token-by-token", "odd-chunks", "whole"])
def test_mixed_batch(served: tuple[TinyCheckpoint, Decoder], chunk_sizes: list[int]) -> None:
    checkpoint, decoder = served
    assert_equal_to_reference(checkpoint, PagedForward(decoder, prompts(), seed=3).run(chunk_sizes))


def test_prefill_of_one_beside_decode_of_others(served: tuple[TinyCheckpoint, Decoder]) -> None:
    checkpoint, decoder = served
    forward = PagedForward(decoder, prompts(), block_size=8)
    forward.step({1: 12, 3: 5})
    forward.step({3: 1, 0: 30, 1: 1})  # requests come in any order
    forward.step({2: 1, 1: 3, 0: 9, 3: 7})
    assert_equal_to_reference(checkpoint, forward.run([4]))


def split_steps(decoder: Decoder, backend: type[SplitKVAttention], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of more than 4 tokens are prompts; those of latent attention are un-absorbed, their cached tokens in
    pieces of 7."""
    monkeypatch.setattr("slipstream.worker.input_batch.MAX_DECODE_QUERY_LEN", 4)
    if decoder.spec.layers[0].attention.latent is None:
        return monkeypatch.setattr(decoder, "backend", backend(decoder.spec))
    monkeypatch.setattr("slipstream.nn.attention.latent.ABSORBED_QUERIES", 5)
    monkeypatch.setattr("slipstream.nn.attention.latent.PREFIX_TOKENS", 7)


def test_decode_rows_attend_apart_from_prompts(
    served: tuple[TinyCheckpoint, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The split of a mixed step that Hopper's backends make, over the ops' references; here 4 tokens are short."""
    checkpoint, decoder = served
    split_steps(decoder, SplitKVFp8Attention, monkeypatch)
    forward = PagedForward(decoder, prompts(), block_size=8)
    forward.step({1: 12, 3: 5})
    forward.step({3: 1, 1: 2, 0: 30})
    forward.step({1: 3, 0: 9, 2: 1, 3: 7})
    assert_equal_to_reference(checkpoint, forward.run([4]))


def test_more_requests_than_the_decode_kernel_takes_go_to_the_paged_one(
    served: tuple[TinyCheckpoint, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, decoder = served
    if decoder.spec.layers[0].attention.latent is not None:
        pytest.skip("latent attention has kernels of its own")
    most, seen, attend = 2, [], ops.decode_attention

    def decode_attention(*arguments: Any, **keywords: Any) -> torch.Tensor:
        seen.append(arguments[2].num_requests)
        return attend(*arguments, **keywords)

    monkeypatch.setattr(ops, "decode_attention", decode_attention)
    monkeypatch.setattr("slipstream_kernels.ops.MAX_DECODE_REQUESTS", most)
    split_steps(decoder, SplitKVAttention, monkeypatch)
    forward = PagedForward(decoder, prompts(), block_size=8)
    forward.step({1: 3, 3: 2})
    forward.step({3: 1, 1: 2, 0: 30})
    forward.step({0: 1, 1: 1, 2: 1, 3: 1})
    assert_equal_to_reference(checkpoint, forward.run([1]))
    assert seen and max(seen) <= most


@pytest.mark.parametrize("has_decode_kernel", [False, True], ids=["paged", "split"])
def test_last_rows_alone(
    served: tuple[TinyCheckpoint, Decoder], has_decode_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer leaves out rows that nobody reads, and even so the caches are whole for the next step."""
    checkpoint, decoder = served
    if has_decode_kernel:
        split_steps(decoder, SplitKVAttention, monkeypatch)
    whole = [checkpoint.logits(prompt) for prompt in prompts()]
    forward = PagedForward(decoder, prompts(), block_size=8)
    for scheduled, wanted in (
        ({1: 12, 3: 5}, ()),
        ({3: 1, 1: 2, 0: 30}, (3, 0)),
        ({1: 3, 0: 9, 2: 1, 3: 7}, (1, 2, 3)),
        ({0: 2, 3: 15}, (0, 3)),
    ):
        logits = forward.step_last(scheduled, wanted)
        ends = [forward.num_computed_tokens[request] - 1 for request in wanted]
        for row, request, end in zip(logits, wanted, ends, strict=True):
            assert relative_error(row, whole[request][end]) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("variant", ["llama3-gqa-rope", "llama-rope-linear", "llama-rope-yarn", "mistral-window"])
def test_what_a_variant_changes_is_visible(variant: str, tmp_path: Path) -> None:
    """Without the scaling or the window the same weights give other logits: the tests above can fail."""
    checkpoint = make_checkpoint(variant, tmp_path)
    for field, plain in (("rope_parameters", {"rope_type": "default", "rope_theta": 500.0}), ("sliding_window", None)):
        if hasattr(checkpoint.model.config, field):
            setattr(checkpoint.model.config, field, plain)
    plain_model = type(checkpoint.model)(checkpoint.model.config).eval()
    plain_model.load_state_dict(checkpoint.model.state_dict())
    prompt = prompts()[0]
    plain_logits = TinyCheckpoint(checkpoint.path, plain_model).logits(prompt)
    decoder = load_model(ModelConfig(model=str(checkpoint.path), device="cpu"))
    (ours,) = PagedForward(decoder, [prompt]).run([len(prompt)])
    assert relative_error(ours, plain_logits) > 100 * TOLERANCE[torch.float32]


def test_dynamic_rope_beyond_the_original_length(tmp_path: Path) -> None:
    """Past max_position_embeddings ours, in any chunks, is what Hugging Face computes token by token."""
    checkpoint = make_checkpoint("llama-rope-dynamic", tmp_path)
    generator = random.Random(1)
    prompt = [generator.randrange(VOCAB_SIZE) for _ in range(2 * MAX_POSITIONS)]
    cache, rows, start = DynamicCache(config=checkpoint.model.config), [], 0
    with torch.no_grad():
        for size in [MAX_POSITIONS] + [1] * MAX_POSITIONS:
            ids = torch.tensor([prompt[start : start + size]])
            rows.append(checkpoint.model(ids, past_key_values=cache, use_cache=True).logits[0])
            start += size
    reference = torch.cat(rows)
    assert relative_error(reference, checkpoint.logits(prompt)) > 0.01  # its one-pass result is another one
    decoder = load_model(ModelConfig(model=str(checkpoint.path), device="cpu"))
    for chunk_sizes in ([2 * MAX_POSITIONS], [13, 50]):
        (ours,) = PagedForward(decoder, [prompt]).run(chunk_sizes)
        assert relative_error(ours, reference) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near(dtype: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen3-bias", tmp_path)
    decoder = load_model(ModelConfig(model=str(checkpoint.path), device="cpu", dtype=dtype))
    ours = PagedForward(decoder, prompts()).run([11])
    for prompt, logits in zip(prompts(), ours):
        assert relative_error(logits, checkpoint.logits(prompt)) < 0.06


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.08)])
@pytest.mark.parametrize("variant", ["llama-gpu", "qwen3-gpu", "mistral-gpu", "mixtral-gpu", "deepseek-gpu"])
def test_gpu_computes_the_same(
    variant: str, dtype: str, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variant == "mixtral-gpu" and dtype == "bfloat16":
        pytest.skip("a rounding may choose another expert")
    checkpoint = make_checkpoint(variant, tmp_path)
    decoder = load_model(ModelConfig(model=str(checkpoint.path), device="cuda", dtype=dtype))
    block_size = 16
    if variant == "deepseek-gpu":
        split_steps(decoder, SplitKVAttention, monkeypatch)
        block_size = 64
    for prompt, logits in zip(prompts(), PagedForward(decoder, prompts(), block_size).run([5, 1, 13])):
        assert relative_error(logits.cpu(), checkpoint.logits(prompt)) <= tolerance


def test_queries_are_rounded_only_over_an_fp8_cache_of_heads_that_are_served(
    served: tuple[TinyCheckpoint, Decoder],
) -> None:
    spec, device, fp8 = served[1].spec, torch.device("cpu"), torch.float8_e4m3fn
    reason = SplitKVFp8Attention.supports
    assert reason(spec, device, torch.bfloat16, torch.bfloat16) == "needs kv_cache_dtype=fp8_e4m3"
    assert reason(spec, device, torch.bfloat16) == "needs kv_cache_dtype=fp8_e4m3"
    assert (
        reason(spec, device, torch.bfloat16, fp8)
        == f"rounds queries of heads of 128, not {spec.layers[0].attention.head_dim}"
    )
    wide = spec.map_attention(lambda own: replace(own, head_dim=128))
    assert reason(wide, device, torch.bfloat16, fp8) == "needs a CUDA device"
