"""A decoder whose small decode steps are one op over all layers computes what its loop over them does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from paged_forward import PagedForward
from slipstream.core.config import ModelConfig
from slipstream.nn.attention.invariant import InvariantAttention
from slipstream.nn.attention.paged import PagedAttention
from slipstream.nn.attention.split_kv import SplitKVAttention
from slipstream.nn.decoder import Decoder
from slipstream.nn.load import load_model
from slipstream.nn.stacked_layers import StackedLayers
from slipstream_kernels import ops
from tiny_checkpoints import VOCAB_SIZE, make_checkpoint, relative_error


@pytest.fixture
def decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """On a CPU, by the op's reference; weights stay as the kernel wants them."""
    monkeypatch.setattr("slipstream.nn.quant.unquantized._can_pack", lambda weight: False)
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
