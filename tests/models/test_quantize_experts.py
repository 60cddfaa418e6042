"""build/quantize.py on MoE models: each expert is fitted to the tokens that chose it, the router is never quantised."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from packed_text import make_packed_text
from quantise_tiny import quantise
from quantized_checkpoints import PROMPT, load, logits, rms_error
from safetensors.torch import load_file, save_file
from slipstream.nn.decoder import Decoder
from slipstream.nn.experts import Experts
from slipstream_kernels import ops
from stored_experts import ROUTERS, make_mixtral
from tiny_checkpoints import make_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build"))
from quantization import quantizer, scaling
from quantization.calibration import LayerWalk, load_recorded, quantised_linears
from quantization.gptq import Feedback, round_by_feedback
from quantization.grids import Grid, fp8_block_grid, fp8_grid, int4_grid, int8_grid, stacked
from quantization.text import cut_windows, read_token_ids

needs_library = pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="needs compressed-tensors (dev)")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two query heads for each head of keys and values."""
    sizes = {"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 128}
    return make_mixtral(tmp_path_factory.mktemp("mixtral"), **sizes)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_packed_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True)
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """AWQ tries four exponents instead of twenty."""
    monkeypatch.setattr(scaling, "STEPS", 4)


@pytest.mark.parametrize(
    ("method", "arguments", "held"),
    [
        ("fp8", ["--algorithm", "gptq"], ("fp8", "fp8")),
        ("wint4", [], ("wint4", "wint4")),
        ("wint4", ["--algorithm", "gptq", "--group-size", "64"], ("wint4", "wint4")),
        ("wint4", ["--algorithm", "awq", "--zeros", "--format", "awq"], ("wint4", "wint4")),
        ("wint4", ["--algorithm", "gptq", "--format", "gptq", "--lm-head"], ("wint4", "wint4")),
        ("w4a8_fp8", ["--algorithm", "gptq", "--group-size", "-1"], ("w4a8_fp8", "w4a8_fp8")),
        ("a8w8_fp8_wint4", ["--algorithm", "awq,gptq", "--lm-head", "--kv-scales"], ("fp8", "w4a8_fp8")),
        ("wint8", [], ("wint8", "wint8")),
        ("w8a8_int8", ["--algorithm", "smoothquant,gptq"], ("w8a8_int8", "w8a8_int8")),
        ("block_wise_fp8", [], ("block_wise_fp8", "block_wise_fp8")),
    ],
)
def test_every_method(
    full: Path, text: Path, tmp_path: Path, method: str, arguments: list[str], held: tuple[str, str]
) -> None:
    made = quantise(full, text, tmp_path / "made", "--method", method, *arguments)
    decoder = load(made)
    assert decoder.spec.stored_format is not None and decoder.spec.expert_format is not None
    assert (decoder.spec.stored_format.method, decoder.spec.expert_format.method) == held
    assert 0.01 < rms_error(logits(decoder), logits(load(full))) < 0.4
    assert torch.equal(logits(load(made, quantization=method)), logits(decoder))
    stored, before = (load_file(folder / "model.safetensors") for folder in (made, full))
    for router in ROUTERS:
        assert {name for name in stored if name.startswith(router)} == {f"{router}.weight"}
        norm = router.replace("block_sparse_moe.gate", "post_attention_layernorm.weight")
        seen = [tensors[f"{router}.weight"] * tensors[norm] for tensors in (stored, before)]
        torch.testing.assert_close(*seen)  # AWQ's factors are in both, and cancel


SHARED: dict[str, dict[str, object]] = {
    "qwen2-moe": {"shared_expert_intermediate_size": 128, "num_experts": 4, "mlp_only_layers": [0]},
    "glm4-moe": {"n_routed_experts": 4, "head_dim": 64},
}
SHARED_SIZES = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture(scope="module", params=SHARED)
def sharing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense layer, and one with experts beside which all tokens take a shared one, of Qwen with a gate."""
    sizes = {**SHARED_SIZES, **SHARED[request.param]}
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), **sizes).path


@pytest.mark.parametrize(
    ("method", "algorithm", "held", "bound"),
    [
        ("w8a8_int8", "smoothquant", "w8a8_int8", 0.06),
        ("wint4", "awq", "wint4", 0.35),
        ("a8w8_fp8_wint4", "awq,gptq", "w4a8_fp8", 0.2),
    ],
)
def test_shared_experts_and_dense_layers(
    sharing: Path, text: Path, tmp_path: Path, method: str, algorithm: str, held: str, bound: float
) -> None:
    made = quantise(sharing, text, tmp_path / "made", "--method", method, "--algorithm", algorithm)
    decoder = load(made)
    assert decoder.spec.stored_format is not None and decoder.spec.expert_format is not None
    of_others = "fp8" if method == "a8w8_fp8_wint4" else held
    assert (decoder.spec.stored_format.method, decoder.spec.expert_format.method) == (of_others, held)
    assert 0.002 < rms_error(logits(decoder), logits(load(sharing))) < bound
    gates = {name for name in load_file(made / "model.safetensors") if "expert_gate" in name}
    assert all(name.endswith(".weight") for name in gates)


def held_by_us(decoder: Decoder, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the experts of a layer are multiplied by: [num_experts, out, in] of gate and up, and of down."""
    mlp = decoder.layers[layer].mlp
    assert isinstance(mlp, Experts)
    found = []
    for linear in (mlp.gate_up, mlp.down):
        weights, size = linear.weights, linear.spec.in_features
        if "packed" in weights:
            group_size = size // weights["scales"].shape[1]
            held = ops.dequantize_int4(ops.int4_weight(weights["packed"], weights["scales"], None, group_size, size))
        else:
            held = weights["weight"].float() * weights["scale"][:, None]
        found.append(held.unflatten(0, (4, -1)))
    return found[0], found[1]


@needs_library
@pytest.mark.parametrize("arguments", [["fp8"], ["wint4", "--group-size", "64"], ["wint4", "--group-size", "-1"],
                                       ["a8w8_fp8_wint4"]])  # fmt: skip
def test_transformers_reads_the_same_experts(full: Path, text: Path, tmp_path: Path, arguments: list[str]) -> None:
    """It dequantises experts as it loads them, by compressed-tensors' code; it takes no zero-points of them.

    transformers 5.17 gives FP8 experts in bfloat16, whatever dtype is asked for: ours are rounded to it then.
    """
    made = quantise(full, text, tmp_path / "made", "--method", *arguments)
    ours, theirs = load(made), AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    for layer in range(2):
        experts = theirs.model.layers[layer].mlp.experts
        for held, read in zip(held_by_us(ours, layer), (experts.gate_up_proj, experts.down_proj)):
            assert read.dtype == torch.float32 or (read.dtype == torch.bfloat16 and arguments == ["fp8"])
            torch.testing.assert_close(held.to(read.dtype), read.data, rtol=1e-6, atol=1e-7)
    if arguments[0] == "wint4":  # no rounding of activations, here or there
        with torch.no_grad():
            assert rms_error(logits(ours), theirs(torch.tensor([PROMPT])).logits[0]) < 1e-5


def test_calibration_lowers_the_error(full: Path, text: Path, tmp_path: Path) -> None:
    """Over the calibration text, of the outputs of each expert."""
    found = {}
    for algorithm in ("", "gptq"):
        made = quantise(full, text, tmp_path / f"made{algorithm}", "--method", "wint4", "--algorithm", algorithm)
        config = json.loads((made / "config.json").read_text())
        assert config["quantization_config"]["ignore"] == [*ROUTERS, "lm_head"]
        found[algorithm] = load(made)
    windows = cut_windows(read_token_ids(text, full, "train"), 256, 64)
    decoder = load_recorded(full, torch.device("cpu"), torch.float32)
    first = decoder.layers[0]
    seen = LayerWalk(decoder, windows, batch_windows=8).record(first)[first.mlp.down]
    for expert, statistics in enumerate(seen):
        errors = []
        for algorithm in found:
            weights = found[algorithm].layers[0].mlp.down.weights
            packed = ops.int4_weight(weights["packed"], weights["scales"], None, 128, 128)
            rows = slice(128 * expert, 128 * expert + 128)
            error = ops.dequantize_int4(packed)[rows] - first.mlp.down.weights["weight"][expert]
            errors.append(((error @ statistics.gram) * error).sum())
        assert errors[1] < 0.9 * errors[0]


def test_a_walk_records_what_each_expert_sees(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = load_recorded(full, torch.device("cpu"), torch.float32)
    layer = decoder.layers[0]
    mlp, asked = layer.mlp, []
    assert isinstance(mlp, Experts)

    def spy_on(name):
        take = getattr(ops, name)

        def spy(x, weight, routing, *quant, by_token):
            asked.append((x, routing, by_token))
            return take(x, weight, routing, *quant, by_token=by_token)

        monkeypatch.setattr(ops, name, spy)

    spy_on("grouped_gated_linear")
    spy_on("grouped_linear")
    seen = LayerWalk(decoder, torch.randint(96, (3, 32)), batch_windows=3).record(layer)
    assert set(seen) == set(quantised_linears(layer)) and len(asked) == 2
    for linear, (x, routing, by_token) in zip((mlp.gate_up, mlp.down), asked):
        rows = x[routing.tokens.long()] if by_token else x
        for statistics, (start, end) in zip(seen[linear], pairwise(routing.offsets.tolist())):
            of_expert = rows[start:end]
            torch.testing.assert_close(statistics.gram, of_expert.t() @ of_expert, rtol=1e-3, atol=1e-3)
            assert statistics.num_tokens == end - start
    assert sum(statistics.num_tokens for statistics in seen[mlp.down]) == 3 * 32 * 2


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8", "fp8 blocks"])
def test_experts_that_are_rounded_together_are_what_each_is_alone(kind: str) -> None:
    """Each has its own order of columns; more of them than GPTQ propagates errors over at once."""
    torch.manual_seed(1)
    make: Callable[[Tensor], Grid] = {
        "int4": lambda weight: int4_grid(weight, 64, True, None, torch.float16),
        "int8": lambda weight: int8_grid(weight, torch.float16),
        "fp8": lambda weight: fp8_grid(weight, torch.float16),
        "fp8 blocks": lambda weight: fp8_block_grid(weight, torch.float32),
    }[kind]
    weights, num_rows = torch.randn(3, 48, 256), torch.tensor([300, 40, 1000])
    inputs = [torch.randn(count, 256) @ torch.randn(256, 256) for count in num_rows.tolist()]
    grams, grids = [x.t() @ x for x in inputs], [make(weight) for weight in weights]
    feedback = Feedback.of(torch.stack(grams), num_rows)
    together = round_by_feedback(weights, feedback, stacked(grids))
    assert len({tuple(order.tolist()) for order in feedback.order}) == 3
    for gram, count, weight, grid, found in zip(grams, num_rows, weights, grids, together, strict=True):
        alone = round_by_feedback(weight, Feedback.of(gram, count), grid)
        # a product of all may add in another order, and a weight between two values then takes the other one
        assert (found == alone).double().mean() > 0.999
        torch.testing.assert_close(grid.nearest(torch.arange(256), found), found)


def test_experts_of_a_layer_are_rounded_at_once(
    full: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate, up and down of all four experts; as many at once as the memory of their statistics allows."""
    counts, made = [], []

    def count(weight: Tensor, *others: object) -> Tensor:
        counts[-1].append(len(weight))
        return round_by_feedback(weight, *others)

    monkeypatch.setattr(quantizer, "round_by_feedback", count)
    for most in (1 << 30, 3 * 8 * 128**2, 1):
        monkeypatch.setattr(quantizer, "MOST_GRAM_BYTES", most)
        counts.append([])
        arguments = "--method", "a8w8_fp8_wint4", "--algorithm", "gptq", "--group-size", "64"
        made.append(load_file(quantise(full, text, tmp_path / str(most), *arguments) / "model.safetensors"))
    attention, num_layers = [1] * 4, 2
    assert counts[0] == (attention + [4] * 3) * num_layers
    assert counts[1] == [*attention, 3, 3, 1, 1, 3, 1] * num_layers
    assert counts[2] == (attention + [1] * 12) * num_layers
    for name, tensor in made[0].items():
        for other in made[1:]:
            assert (tensor.float() == other[name].float()).double().mean() > 0.99, name


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
def test_experts_that_no_token_chose(
    full: Path, text: Path, tmp_path: Path, algorithm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are rounded as without calibration, and named."""
    tensors = load_file(full / "model.safetensors")
    for router in ROUTERS:  # of equal scores the lower expert is chosen: never the last
        weight = tensors[f"{router}.weight"]
        weight[1], weight[2:] = -weight[0], 0
    shy = tmp_path / "shy"
    shy.mkdir()
    save_file(tensors, shy / "model.safetensors")
    (shy / "config.json").write_text((full / "config.json").read_text())
    made = quantise(shy, text, tmp_path / "made", "--method", "wint4", "--algorithm", algorithm)
    assert "did not reach, rounded without calibration: layer 0: 3; layer 1: 3" in capsys.readouterr().out
    assert logits(load(made)).isfinite().all()
    if algorithm == "gptq":
        plain = load_file(quantise(shy, text, tmp_path / "plain", "--method", "wint4") / "model.safetensors")
        fitted = load_file(made / "model.safetensors")
        packed = [name for name in plain if name.endswith("weight_packed") and "experts" in name]
        same = {name.split(".")[5] for name in packed if torch.equal(plain[name], fitted[name])}
        assert same == {"3"}


def test_quantised_experts_are_not_quantised_again(full: Path, text: Path, tmp_path: Path) -> None:
    made = quantise(full, text, tmp_path / "made", "--method", "wint4")
    with pytest.raises(ValueError, match="is quantised already, in wint4"):
        quantise(made, text, tmp_path / "again", "--method", "fp8")
