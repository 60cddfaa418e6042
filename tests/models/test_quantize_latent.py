"""build/quantize.py and build/evaluate.py on models with latent attention: kv_b_proj stays in plain numbers."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from packed_text import make_packed_text
from quantise_tiny import NUM_TOKENS, WINDOW_TOKENS, quantise
from quantized_checkpoints import PROMPT, load, logits, rms_error
from safetensors.torch import load_file, save_file
from slipstream.nn.decoder import Decoder
from slipstream.nn.heads.mtp import MTPModule
from slipstream.nn.latent_attention import LatentAttention
from slipstream.nn.linear import Linear
from tiny_checkpoints import make_checkpoint
from tiny_latent_mtp import add_mtp
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build"))
import evaluate
from quantization import scaling
from quantization.calibration import InputStatistics, LayerWalk, load_recorded, quantised_linears
from quantization.forward import Schedule, window_logits
from quantization.text import cut_windows, read_token_ids

needs_library = pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="needs compressed-tensors (dev)")
SIZES = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "moe_intermediate_size": 128, "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
MODELS = {
    "deepseek-v2-lite": {},  # queries of one product, two shared experts
    "deepseek-v3": {"q_lora_rank": 128, "n_group": 2, "topk_group": 1},
    "glm4-moe-lite": {"q_lora_rank": 128, "qk_nope_head_dim": 192, "v_head_dim": 256},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("latent")
    return {name: make_checkpoint(name, folder / name, **{**SIZES, **own}).path for name, own in MODELS.items()}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_packed_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True)
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """AWQ tries four exponents instead of twenty."""
    monkeypatch.setattr(scaling, "STEPS", 4)


def calibration_windows(model: Path, text: Path) -> torch.Tensor:
    return cut_windows(read_token_ids(text, model, "train"), NUM_TOKENS, WINDOW_TOKENS)


def up_projection(decoder: Decoder, layer: int) -> torch.Tensor:
    attention = decoder.layers[layer].attention
    assert isinstance(attention, LatentAttention)
    return attention.kv_b.matrix


V2, V3, GLM = MODELS
CASES = [
    (V2, "wint4", ["--algorithm", "gptq"], "wint4", 0.4),
    (V2, "wint4", ["--algorithm", "awq", "--zeros", "--format", "awq"], "wint4", 0.4),
    (V2, "a8w8_fp8_wint4", ["--algorithm", "awq,gptq"], "fp8", 0.3),
    (V2, "wint8", ["--algorithm", "gptq"], "wint8", 0.1),
    (V3, "wint4", ["--algorithm", "gptq", "--format", "gptq", "--lm-head"], "wint4", 0.4),
    (V3, "w4a8_fp8", ["--algorithm", "awq", "--group-size", "64"], "w4a8_fp8", 0.4),
    (V3, "w8a8_int8", ["--algorithm", "smoothquant,gptq"], "w8a8_int8", 0.1),
    (V3, "block_wise_fp8", ["--algorithm", "gptq"], "block_wise_fp8", 0.2),
    (V3, "a8w8_fp8_wint4", ["--algorithm", "gptq", "--lm-head"], "fp8", 0.3),
    (GLM, "wint4", ["--algorithm", "awq,gptq", "--group-size", "-1"], "wint4", 0.4),
    (GLM, "fp8", ["--algorithm", "gptq"], "fp8", 0.2),
    (GLM, "a8w8_fp8_wint4", [], "fp8", 0.3),
]


@pytest.mark.parametrize(("name", "method", "arguments", "held", "bound"), CASES)
def test_every_method(
    models: dict[str, Path], text: Path, tmp_path: Path, name: str, method: str, arguments: list[str],
    held: str, bound: float,
) -> None:  # fmt: skip
    full = models[name]
    made = quantise(full, text, tmp_path / "made", "--method", method, *arguments)
    decoder = load(made)
    assert decoder.spec.stored_format is not None and decoder.spec.expert_format is not None
    assert decoder.spec.stored_format.method == held
    assert decoder.spec.expert_format.method == ("w4a8_fp8" if method == "a8w8_fp8_wint4" else held)
    assert 0.005 < rms_error(logits(decoder), logits(load(full))) < bound
    stored, before = (load_file(folder / "model.safetensors") for folder in (made, full))
    folds = any(algorithm in "".join(arguments) for algorithm in ("awq", "smoothquant"))
    for layer in range(2):
        tensor = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
        assert {one for one in stored if "kv_b_proj" in one and f".{layer}." in one} == {tensor}
        assert torch.equal(up_projection(decoder, layer), stored[tensor])
        # factors of o's inputs are folded into the rows of values, where a method of attention has some
        assert torch.equal(stored[tensor], before[tensor]) != (folds and method != "a8w8_fp8_wint4")


@needs_library
@pytest.mark.parametrize(
    ("name", "arguments", "bound"),
    [
        (V2, ["wint4", "--algorithm", "awq,gptq"], 1e-5),
        (V3, ["wint4", "--algorithm", "gptq"], 1e-5),
        (V3, ["wint8", "--algorithm", "gptq"], 1e-5),
        (GLM, ["wint4", "--algorithm", "gptq", "--group-size", "64"], 1e-5),
        (GLM, ["a8w8_fp8_wint4", "--algorithm", "gptq"], 0.05),  # which rounds no activations there
    ],
)
def test_transformers_reads_the_same_model(
    models: dict[str, Path], text: Path, tmp_path: Path, name: str, arguments: list[str], bound: float
) -> None:
    made = quantise(models[name], text, tmp_path / "made", "--method", *arguments)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)(torch.tensor([PROMPT])).logits[0]
    assert rms_error(logits(load(made)), theirs) < bound


def with_features_that_stand_out(full: Path, folder: Path) -> Path:
    """As in trained models: every 16th feature of normed inputs is six times as large."""
    shutil.copytree(full, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight") and "kv_a" not in name:
            tensor[::16] *= 6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_calibration_lowers_the_error(models: dict[str, Path], text: Path, tmp_path: Path, name: str) -> None:
    """Over the calibration text: of the first layer's outputs, and of GPTQ that of the logits and of each linear."""
    full = with_features_that_stand_out(models[name], tmp_path / "full")
    windows, decoder, found = calibration_windows(full, text), load(full), {}

    def first_outputs(decoder: Decoder) -> torch.Tensor:
        walk = LayerWalk(decoder, windows, batch_windows=4)
        walk.pass_on(decoder.layers[0])
        return torch.cat([batch.hidden + batch.residual for batch in walk.batches])

    def all_logits(decoder: Decoder) -> torch.Tensor:
        return torch.stack(list(window_logits(decoder, windows, "auto", Schedule())))

    for method, algorithm in (("wint4", ""), ("wint4", "gptq"), ("wint4", "awq"), ("w8a8_int8", "smoothquant")):
        arguments = ["--method", method, "--algorithm", algorithm]
        found[algorithm] = load(quantise(full, text, tmp_path / f"made-{algorithm}", *arguments))
    expected, rounded = first_outputs(decoder), load(full, quantization="w8a8_int8")
    errors = {algorithm: rms_error(first_outputs(one), expected) for algorithm, one in found.items()}
    assert errors["gptq"] < 0.6 * errors[""]
    assert errors["awq"] < 0.95 * errors[""]
    assert errors["smoothquant"] < 0.8 * rms_error(first_outputs(rounded), expected)

    expected = all_logits(decoder)
    assert rms_error(all_logits(found["gptq"]), expected) < 0.8 * rms_error(all_logits(found[""]), expected)

    decoder = load_recorded(full, torch.device("cpu"), torch.float32)
    first = decoder.layers[0]
    for place, (linear, (seen,)) in enumerate(LayerWalk(decoder, windows, batch_windows=4).record(first).items()):
        plain, gptq = (
            _output_error(quantised_linears(found[algorithm].layers[0])[place], linear, seen)
            for algorithm in ("", "gptq")
        )
        assert gptq < 0.7 * plain, linear.spec.parts


def _output_error(quantised: Linear, full: Linear, seen: InputStatistics) -> float:
    error = quantised(torch.eye(full.spec.in_features)).t() - full.weights["weight"]
    return float(((error @ seen.gram) * error).sum())


def test_scales_of_an_fp8_cache_are_refused(models: dict[str, Path], text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kv-scales: FP8 rows of latent attention .* accepted: without it"):
        quantise(models[V3], text, tmp_path / "made", "--method", "fp8", "--kv-scales")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("packing", "key", "entry"),
    [
        ("compressed-tensors", "ignore", r"re:model\.layers\.2\..*"),
        ("awq", "modules_to_not_convert", "model.layers.2"),
        ("gptq", "dynamic", r"-:model\.layers\.2\..*"),
    ],
)
def test_an_mtp_layer_is_copied(
    models: dict[str, Path], text: Path, tmp_path: Path, packing: str, key: str, entry: str
) -> None:
    """It drafts in plain numbers, and the config tells other engines so."""
    full = make_checkpoint(V3, tmp_path / "full", **{**SIZES, **MODELS[V3]}).path
    add_mtp(full)
    made = quantise(full, text, tmp_path / "made", "--method", "wint4", "--zeros", "--format", packing)
    assert entry in json.loads((made / "config.json").read_text())["quantization_config"][key]
    ours, theirs = (MTPModule.load(load(folder), folder, 64) for folder in (made, full))
    tensors = [list(module.layer.tensors()) for module in (ours, theirs)]
    assert len(tensors[0]) == len(tensors[1]) and all(
        torch.equal(ours.to_dense(), theirs.to_dense()) for ours, theirs in zip(*tensors)
    )


def test_evaluation(
    models: dict[str, Path],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one step a window, whose keys are made from latents, and in steps of four tokens, which are absorbed."""
    full = models[V2]
    made = quantise(full, text, tmp_path / "made", "--method", "wint4", "--algorithm", "gptq")
    found = []
    for step_tokens in ("64", "4"):
        arguments = [
            "--model", str(full), "--text", str(text), "--weights", f"none,a8w8_fp8_wint4,mine={made}",
            "--kv", "auto,fp8_e4m3,int8", "--num-tokens", "128", "--window-tokens", "64", "--device", "cpu",
            "--step-tokens", step_tokens, "--output", str(tmp_path / step_tokens),
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments])
        evaluate.main()
        assert "left out: mine with a KV cache of int8: " in capsys.readouterr().out
        found.append(json.loads((tmp_path / step_tokens / "evaluation.json").read_text())["results"])
        assert [(result["weights"], result["kv"]) for result in found[-1]] == [
            (weights, kv) for weights in ("none", "a8w8_fp8_wint4", "mine") for kv in ("auto", "fp8_e4m3")
        ]
    divergences = [[result["measures"]["divergence"] for result in results] for results in found]
    assert all(own[0] == pytest.approx(0, abs=1e-9) and all(one > 1e-5 for one in own[1:]) for own in divergences)
    assert divergences[0] == pytest.approx(divergences[1], rel=0.05)
