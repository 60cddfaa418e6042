"""A decoder whose small decode steps are one op over all layers computes what its loop over them does."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from paged_forward import PagedForward
from slipstream import LLM, SamplingParams
from slipstream.core.config import ModelConfig
from slipstream.nn.attention.invariant import InvariantAttention
from slipstream.nn.attention.paged import PagedAttention
from slipstream.nn.attention.split_kv import SplitKVAttention
from slipstream.nn.decoder import Decoder
from slipstream.nn.load import load_model
from slipstream.nn.stacked_layers import StackedLayers
from slipstream_kernels import ops
from slipstream_kernels.kv_cache import FP8_DTYPE
from tiny_checkpoints import VOCAB_SIZE, make_checkpoint, relative_error

TOKENIZER = Path(__file__).parents[2] / "models/slipstream-demo-code"
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@pytest.fixture
def decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """On a CPU, by the op's reference; weights stay as the kernel wants them."""
    monkeypatch.setattr("slipstream_kernels.gemm.repack_plain.can_repack", lambda weight: False)
    monkeypatch.setattr(SplitKVAttention, "supports", staticmethod(lambda *arguments: None))
    checkpoint = make_checkpoint("llama3-gqa-rope", tmp_path)
    return load_model(ModelConfig(model=str(checkpoint.path), device="cpu"))


def test_decode_steps_are_the_same_in_one_op(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(7)
    prompts = [[generator.randrange(VOCAB_SIZE) for _ in range(length)] for length in (9, 17, 12)]
    expected = PagedForward(decoder, prompts).run([6, 1])
    calls = []
    decode_layers = ops.decode_layers

    def counted(hidden, stack, rows, backend):
        calls.append(len(hidden))
        return decode_layers(hidden, stack, rows, backend="reference")

    monkeypatch.setattr(ops, "decode_layers", counted)
    monkeypatch.setattr(ops, "decode_layers_refusal", lambda stack: None)
    monkeypatch.setattr(ops, "max_stacked_tokens", lambda stack: 8)
    monkeypatch.setattr(decoder, "_stacked", StackedLayers(decoder.spec, decoder.layers))
    for ours, right in zip(PagedForward(decoder, prompts).run([6, 1]), expected):
        assert relative_error(ours, right) < 1e-5
    assert calls == [3, 1]  # the steps of one token each, of three requests and of the one that is left


def test_only_a_gpus_backend_stacks_layers(decoder: Decoder) -> None:
    """And none whose rows must not depend on each other: parts of a sequence are shared as the batch has them."""
    assert decoder.backend.stacks_layers and decoder._stacked is not None
    assert not PagedAttention.stacks_layers and not InvariantAttention.stacks_layers


def test_why_not_is_said(decoder: Decoder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own reason: here that the layers are on a CPU."""
    caplog.set_level("INFO")
    monkeypatch.setattr(decoder, "_stacked", StackedLayers(decoder.spec, decoder.layers))
    PagedForward(decoder, [[1, 2, 3]]).run([1])
    assert "layers in one launch: the layers are on cpu" in caplog.text


@needs_hopper
@pytest.mark.parametrize("kv_dtype", [None, FP8_DTYPE], ids=["bf16kv", "fp8kv"])
@pytest.mark.parametrize("quantization", ["fp8", "wint4"])
def test_a_gpu_computes_the_same_in_one_launch(
    quantization: str, kv_dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests, of which two leave: the steps of two and of one are one launch each."""
    checkpoint = make_checkpoint("llama-one-launch", tmp_path)
    decoder = load_model(
        ModelConfig(model=str(checkpoint.path), device="cuda", dtype="bfloat16", quantization=quantization)
    )
    generator = random.Random(3)
    prompts = [[generator.randrange(VOCAB_SIZE) for _ in range(length)] for length in (9, 14, 40)]
    calls = []
    decode_layers = ops.decode_layers

    def counted(hidden, stack, rows, backend):
        calls.append(len(hidden))
        return decode_layers(hidden, stack, rows, backend=backend)

    monkeypatch.setattr(ops, "decode_layers", counted)
    chunks = [6, *[1] * 40]
    ours = PagedForward(decoder, prompts, block_size=16, kv_dtype=kv_dtype).run(chunks)
    assert calls == [2] * 5 + [1] * 26
    monkeypatch.setattr(decoder, "_stacked", None)
    for mine, right in zip(ours, PagedForward(decoder, prompts, block_size=16, kv_dtype=kv_dtype).run(chunks)):
        assert relative_error(mine, right) < 0.06
    assert len(calls) == 31


@needs_hopper
@pytest.mark.parametrize("quantization", ["fp8", "wint4"])
def test_one_launch_in_graphs(
    quantization: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests join and leave: a request's tokens are those of eager steps, which launch the same kernels.

    Steps with prompts are in no graph here. A graph computes all of its padded rows in the last layer, an eager step
    those that sample alone: with FP8 weights the activations of 16 rows are rounded to e4m3, those of two are not.
    """
    caplog.set_level("INFO")
    monkeypatch.setattr("slipstream.worker.graph_shapes.MIN_PROMPT_TOKENS", 1 << 30)
    monkeypatch.setattr("slipstream.worker.cuda_graphs.LAUNCH_BOUND", 0.0)
    checkpoint = make_checkpoint("llama-one-launch", tmp_path)
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [1, 3, 5, 7]]
    wishes = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (20, 9, 30)]
    found = []
    for graphs in ("off", "auto"):
        fields = {"device": "cuda", "dtype": "bfloat16", "quantization": quantization, "cuda_graphs": graphs}
        fields["tokenizer"] = str(TOKENIZER)
        with LLM(str(checkpoint.path), num_blocks=64, max_num_seqs=2, **fields) as llm:
            found.append([one.token_ids for one in llm.generate(prompts, wishes)])
    assert found[0] == found[1] and [len(ids) for ids in found[0]] == [20, 9, 30]
    assert "layers in one launch: decodes of up to 2 requests" in caplog.text
    assert re.search(r"captured 2 graphs in .*: decode steps of 1, 2 requests", caplog.text)
