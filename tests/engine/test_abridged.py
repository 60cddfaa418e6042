"""A start compiles kernels by layers that differ: which are left out, and that nothing is left out afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paged_forward import PagedForward
from slipstream.core.config import ModelConfig
from slipstream.nn.decoder import Decoder, DecoderLayer
from slipstream.nn.load import load_model
from slipstream.nn.parallel import SINGLE, Parallel
from tiny_checkpoints import make_checkpoint
from tiny_model import make_tiny_llama

PROMPT = [5, 9, 2, 14, 3]
# Variant -> layers that are run: the first, one of each kind behind it, the last.
VARIANTS = {
    "llama2-mha": [0, 1, 4],
    "deepseek-v3": [0, 1, 4],  # one dense layer
    "gpt-oss": [0, 1, 2, 4],  # windows and all tokens in turns
}


@pytest.fixture
def run_layers(monkeypatch: pytest.MonkeyPatch) -> list[DecoderLayer]:
    run: list[DecoderLayer] = []
    call = DecoderLayer.__call__

    def noted(self: DecoderLayer, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
        run.append(self)
        return call(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(DecoderLayer, "__call__", noted)
    return run


def load(folder: Path, parallel: Parallel = SINGLE) -> Decoder:
    return load_model(ModelConfig(model=str(folder), device="cpu"), parallel=parallel)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_layer_of_each_kind_is_run(variant: str, tmp_path: Path, run_layers: list[DecoderLayer]) -> None:
    sizes = {"num_hidden_layers": 5} | ({"layer_types": None} if variant == "gpt-oss" else {})
    decoder = load(make_checkpoint(variant, tmp_path, **sizes).path)
    whole = PagedForward(decoder, [PROMPT]).run([5])[0]
    assert [decoder.layers.index(layer) for layer in run_layers] == [0, 1, 2, 3, 4]
    run_layers.clear()
    with decoder.abridged():
        PagedForward(decoder, [PROMPT]).run([5])
    assert [decoder.layers.index(layer) for layer in run_layers] == VARIANTS[variant]
    assert torch.equal(PagedForward(decoder, [PROMPT]).run([5])[0], whole)


def test_layers_whose_weights_differ_are_both_run(tmp_path: Path, run_layers: list[DecoderLayer]) -> None:
    """As where a quantised checkpoint leaves a layer out."""
    decoder = load(make_tiny_llama(tmp_path, num_layers=5))
    down = decoder.layers[2].linears()[-1]
    down._weight = down.weight.__class__(down.weight.kind._replace(format="fp8"), down.weight.operand)
    traits = [layer.traits for layer in decoder.layers]
    assert [kind == traits[1] for kind in traits] == [True, True, False, True, True]
    with decoder.abridged():
        assert decoder._skipped == {3}
    assert not decoder._skipped


def test_stages_are_not_abridged(tmp_path: Path) -> None:
    """A stage has no weights of the others' layers to compare."""
    decoder = load(make_tiny_llama(tmp_path, num_layers=5), Parallel(stage=0, layers=(3, 2)))
    with decoder.abridged():
        assert not decoder._skipped
