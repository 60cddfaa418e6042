"""Checkpoints whose lists leave some layers, or some parts of them, unquantised: what is quantised and what is not."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paged_forward import PagedForward
from quantized_checkpoints import PROMPT, Tensors, load, logits, rms_error, store
from rank_threads import on_each, parallels
from safetensors.torch import load_file, save_file
from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.decoder import Decoder
from slipstream.nn.heads.mtp import MTPModule
from slipstream.nn.latent_attention import UpProjection
from slipstream.nn.linear import Linear
from slipstream.nn.load import load_model, weight_bytes
from slipstream.nn.read_spec import read_spec
from stored_experts import Writer, awq, fp8, gptq
from tiny_checkpoints import make_checkpoint
from tiny_latent_mtp import SIZES, add_mtp

DENSE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel"}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
Quantization = Callable[[list[str]], dict[str, object]]


def compressed(left_out: list[str], targets: list[str] | None = None) -> dict[str, object]:
    group = {"targets": targets or ["Linear"], "weights": CHANNELS, "input_activations": TOKENS}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$", *left_out],
    }  # fmt: skip


def of_awq(left_out: list[str]) -> dict[str, object]:
    return {"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": left_out}


def of_gptq(left_out: list[str]) -> dict[str, object]:
    rules = {f"-:.*{entry.replace('.', '[.]')}": {} for entry in left_out}
    return {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True, "dynamic": rules}


def of_blocks(left_out: list[str]) -> dict[str, object]:
    return {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": left_out}


# name -> (the format, its writer, how near to the numbers that are stored)
FORMATS: dict[str, tuple[Quantization, Writer, float]] = {
    "awq": (of_awq, awq(64), 1e-5),
    "gptq": (of_gptq, gptq(64, sym=True), 1e-5),
    "fp8-blocks": (of_blocks, fp8("block", "weight_scale_inv"), 0.15),
    "compressed-tensors": (compressed, fp8("channel"), 0.15),
}
# entries of a list -> the modules that they mean
DENSE_LISTS = {
    "model.layers.0.": r"\.layers\.0\.",
    "layers.1.mlp": r"\.layers\.1\.mlp\.",
    "o_proj": r"o_proj$",
    "down_proj": r"down_proj$",
}
LATENT_LISTS = {
    "layers.0.self_attn.kv_b_proj": r"layers\.0\.self_attn\.kv_b_proj$",
    "q_a_proj kv_a_proj_with_mqa": r"(q_a_proj|kv_a_proj_with_mqa)$",
    "layers.2.mlp.experts": r"layers\.2\.mlp\.experts\.",
    "shared_experts": r"shared_experts\.",
    "model.layers.0": r"\.layers\.0\.",
    "model.layers.2": r"\.layers\.2\.",
    "q_a_proj q_b_proj kv_a_proj_with_mqa o_proj mlp": r"(q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj)$|\.mlp\.",
}


def leaving_out(write: Writer, pattern: str) -> Writer:
    """As the writer, but these modules keep their plain numbers."""

    def write_others(tensors: Tensors) -> Tensors:
        kept = {name: tensors.pop(name) for name in list(tensors) if re.search(pattern, name.removesuffix(".weight"))}
        assert kept
        held = write(tensors)
        tensors.update(kept)
        return held

    return write_others


def store_both(full: Path, folder: Path, quantization: dict[str, object], write: Writer) -> tuple[Path, Path]:
    """(the quantised checkpoint, an unquantised one of what it stands for)."""
    held: Tensors = {}
    stored = store(full, folder / "stored", quantization, lambda tensors: held.update(write(tensors)))
    return stored, store(full, folder / "held", {}, lambda tensors: tensors.update(held))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama2-mha", tmp_path_factory.mktemp("dense"), **DENSE).path


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {**SIZES, "num_hidden_layers": 3, "qk_rope_head_dim": 128}
    return make_checkpoint("deepseek-v3", tmp_path_factory.mktemp("latent"), **sizes).path


def check(full: Path, folder: Path, name: str, entries: str, pattern: str) -> Decoder:
    """Computes what the stored numbers say; what the list leaves out is held in plain numbers, the rest is not."""
    quantization, write, tolerance = FORMATS[name]
    stored, held = store_both(full, folder, quantization(entries.split()), leaving_out(write, pattern))
    decoder = load(stored)
    error = rms_error(logits(decoder), logits(load(held)))
    assert error < tolerance
    config = ModelConfig(model=str(stored), device="cpu")
    assert weight_bytes(config, decoder.spec, torch.float32) == sum(one.nbytes for one in decoder.tensors())
    return decoder


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("axis", [0, -1])
def test_axes_of_one_say_nothing(dense: Path, tmp_path: Path, name: str, axis: int) -> None:
    """Some tools store scales as a row, others as a column; the same holds for all tensors."""
    quantization, write, _ = FORMATS[name]
    stored, _ = store_both(dense, tmp_path, quantization([]), write)
    expected = logits(load(stored))
    tensors = {name: tensor.unsqueeze(axis) for name, tensor in load_file(stored / "model.safetensors").items()}
    save_file(tensors, stored / "model.safetensors")
    assert torch.equal(logits(load(stored)), expected)


def has_quantised(decoder: Decoder, pattern: str) -> bool:
    """Whether any linear layer of which a part's place, as "layers.0.o", matches is quantised."""
    linears = [(index, linear) for index, layer in enumerate(decoder.layers) for linear in layer.linears()]
    return any(
        linear.method.stored is not None
        for index, linear in linears
        if isinstance(linear, Linear) and re.search(pattern, f"layers.{index}.{linear.spec.parts[0][0]}")
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("entries", DENSE_LISTS)
def test_layers_and_parts_of_a_dense_model(dense: Path, tmp_path: Path, name: str, entries: str) -> None:
    decoder = check(dense, tmp_path, name, entries, DENSE_LISTS[entries])
    plain = {"model.layers.0.": r"layers\.0\.", "layers.1.mlp": r"layers\.1\.(gate|down)", "o_proj": r"\.o$"}
    pattern = plain.get(entries, r"\.down$")
    assert not has_quantised(decoder, pattern) and has_quantised(decoder, rf"^(?!.*{pattern})")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("entries", LATENT_LISTS)
def test_layers_and_parts_of_latent_attention_and_experts(
    latent: Path, tmp_path: Path, name: str, entries: str
) -> None:
    check(latent, tmp_path, name, entries, LATENT_LISTS[entries])


def test_an_up_projection_keeps_its_numbers_in_one_layer(latent: Path, tmp_path: Path) -> None:
    decoder = check(latent, tmp_path, "awq", "layers.0.self_attn.kv_b_proj", r"layers\.0\.self_attn\.kv_b_proj$")
    first, second = (layer.linears()[2] for layer in decoder.layers[:2])
    assert isinstance(first, UpProjection) and isinstance(second, UpProjection)
    held = [load(tmp_path / "held").layers[layer].linears()[2].weights["weight"] for layer in range(2)]
    assert torch.equal(first.matrix, held[0])
    torch.testing.assert_close(second.matrix, held[1], rtol=1e-5, atol=1e-6)


def test_targets_that_are_not_all_linear_layers(latent: Path, tmp_path: Path) -> None:
    """compressed-tensors quantises what a group's targets mean, and nothing else."""
    write = leaving_out(fp8("channel"), r"self_attn|shared_experts|\.0\.mlp")
    quantization = compressed([], [r"re:.*mlp\.experts\.\d+\..*"])
    stored, held = store_both(latent, tmp_path, quantization, write)
    assert read_spec(stored).stored_format is None and read_spec(stored).expert_format is not None
    assert rms_error(logits(load(stored)), logits(load(held))) < 0.15


@pytest.mark.parametrize("entries", ["model.layers.2", "shared_experts", "q_a_proj kv_a_proj_with_mqa"])
@pytest.mark.parametrize("splits_experts", [False, True])
def test_ranks_compute_what_one_computes(latent: Path, tmp_path: Path, entries: str, splits_experts: bool) -> None:
    write = leaving_out(awq(64), LATENT_LISTS[entries])
    config = ModelConfig(model=str(store_both(latent, tmp_path, of_awq(entries.split()), write)[0]), device="cpu")

    def computed(decoder: Decoder) -> torch.Tensor:
        return PagedForward(decoder, [PROMPT]).run([3, 1])[0]

    ranks = [load_model(config, parallel=replace(one, splits_experts=splits_experts)) for one in parallels(2)]
    first, second = on_each(ranks, computed)
    assert torch.equal(first, second) and rms_error(first, computed(load_model(config))) < 1e-5


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        (
            "q_a_proj",
            r"leaves model\.layers\.0\.self_attn\.q_a_proj unquantised, not .*kv_a_proj_with_mqa; they are mul",
        ),
        ("experts.3", r"leaves model\.layers\.1\.mlp\.experts\.3\.gate_proj unquantised, not .*experts\.0\.gate_proj"),
        ("layers.1.mlp.experts.0.down_proj", r"leaves .*0\.down_proj unquantised, not .*0\.gate_proj"),
        ("up_proj", r"leaves .*up_proj unquantised, not .*gate_proj"),
    ],
)
def test_what_is_multiplied_as_one_is_stored_as_one(latent: Path, tmp_path: Path, entries: str, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config\.json quantization_config modules_to_not_convert=.*{named}"):
        read_spec(store(latent, tmp_path, of_blocks(entries.split()), lambda tensors: tensors))


@pytest.mark.parametrize(
    "pattern", [r"\.2\.mlp\.", r"\.2\.self_attn\.", r"\.3\.mlp\.", r"\.3\.self_attn\.(kv_b|o)_proj"]
)
def test_an_mtp_module_is_read_as_its_own_tensors_are(latent: Path, tmp_path: Path, pattern: str) -> None:
    """Module 3 behind a last layer 2, of which one is stored in plain numbers in part and the other is not."""
    shutil.copytree(latent, tmp_path / "full")
    add_mtp(tmp_path / "full")
    quantization = compressed([f"re:.*{pattern}.*", "re:.*eh_proj"])
    write = leaving_out(fp8("channel"), rf"{pattern}|eh_proj|shared_head")
    folders = store_both(tmp_path / "full", tmp_path, quantization, write)
    assert rms_error(*map(mtp_logits, folders)) < 0.15


def test_an_mtp_module_whose_scales_have_no_axis(latent: Path, tmp_path: Path) -> None:
    shutil.copytree(latent, tmp_path / "full")
    add_mtp(tmp_path / "full")
    quantization = {"quant_method": "fp8", "modules_to_not_convert": ["eh_proj", "mlp.gate", "shared_head"]}
    write = leaving_out(fp8("tensor"), "eh_proj|shared_head")
    assert rms_error(*map(mtp_logits, store_both(tmp_path / "full", tmp_path, quantization, write))) < 0.15


def mtp_logits(folder: Path) -> torch.Tensor:
    module = MTPModule.load(load(folder), folder, 64)
    states = torch.randn(len(PROMPT), 128, generator=torch.Generator().manual_seed(3))
    forward = PagedForward(load(folder), [PROMPT], block_size=8)
    with torch.inference_mode():
        return module.logits(module.forward(forward._batch({0: len(PROMPT)}), states, forward.kv_caches[0]))
