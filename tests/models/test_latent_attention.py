"""Stored formats of models with latent attention: each is read exactly, `kv_b_proj` as numbers, and FP8 cache rows."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from paged_forward import PagedForward
from quantized_checkpoints import PROMPT, Tensors, load, logits, rms_error, store
from safetensors.torch import load_file, save_file
from slipstream.core.errors import ConfigError
from slipstream.nn.attention.invariant_latent import InvariantLatent
from slipstream.nn.heads.mtp import MTPModule
from slipstream.nn.latent_attention import LatentAttention
from stored_experts import E4M3, Writer, awq, fp8, gptq, linears
from tiny_checkpoints import make_checkpoint, relative_error
from tiny_latent_mtp import SIZES, add_mtp
from transformers import AutoConfig

KEPT = ["lm_head", "gate"]  # routers
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "modules_to_not_convert": ["mlp.gate"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def blocks(tensors: Tensors) -> Tensors:
    """DeepSeek-V3's layout; kv_a_proj_with_mqa ends inside a block."""
    held = {}
    for name in linears(tensors):
        weight = tensors[f"{name}.weight"]
        rows, columns = (-(-size // 128) * 128 for size in weight.shape)
        padded = torch.zeros(rows, columns)
        padded[: weight.shape[0]] = weight
        scales = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).abs().amax((1, 3)) / 448
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0]]
        values = (weight / spread).to(E4M3)
        held[f"{name}.weight"] = values.float() * spread
        tensors |= {f"{name}.weight": values, f"{name}.weight_scale_inv": scales}
    return held


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("deepseek-v3", tmp_path_factory.mktemp("latent"), **SIZES).path


@pytest.fixture(scope="module")
def lite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Queries are projected from the token itself, beside latents."""
    sizes = {**SIZES, "q_lora_rank": None}
    return make_checkpoint("deepseek-v2-lite", tmp_path_factory.mktemp("lite"), **sizes).path


FORMATS: dict[str, tuple[dict[str, object], Writer, float]] = {
    "fp8-blocks": (BLOCKS, blocks, 0.15),
    "awq": (AWQ, awq(64), 1e-5),
    "gptq": (GPTQ, gptq(64, sym=True), 1e-5),
    "gptq-act-order": ({**GPTQ, "desc_act": True}, gptq(64, sym=True, desc_act=True), 1e-5),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model", ["full", "lite"])
def test_stored_formats(request: pytest.FixtureRequest, tmp_path: Path, name: str, model: str) -> None:
    full: Path = request.getfixturevalue(model)
    quantization, write, tolerance = FORMATS[name]
    held: Tensors = {}
    decoder = load(store(full, tmp_path / "stored", quantization, lambda tensors: held.update(write(tensors))))
    of_held = load(store(full, tmp_path / "held", {}, lambda tensors: tensors.update(held)))
    assert rms_error(logits(decoder), logits(of_held)) < tolerance
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer.attention, LatentAttention)
        expected = held[f"model.layers.{index}.self_attn.kv_b_proj.weight"]
        torch.testing.assert_close(layer.attention.kv_b.matrix, expected, rtol=1e-5, atol=1e-6)
        assert layer.attention.kv_b._loading is None, "the stored form is given back"


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False}
FLOAT8 = {"num_bits": 8, "type": "float"}
SCHEMES: dict[str, tuple[dict[str, object], dict[str, object] | None, str, float]] = {
    "w4a16-zeros": (INT4, None, "pack-quantized", 1e-5),
    "fp8": (
        {**FLOAT8, "strategy": "channel"}, {**FLOAT8, "strategy": "token", "dynamic": True}, "float-quantized", 0.15
    ),
}  # fmt: skip


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="needs compressed-tensors (dev)")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("leaves_out_kv_b", [False, True])
def test_written_by_compressed_tensors(full: Path, tmp_path: Path, scheme: str, leaves_out_kv_b: bool) -> None:
    from stored_by_compressed_tensors import compress_linears

    weights, inputs, form, tolerance = SCHEMES[scheme]
    held: Tensors = {}

    def write(tensors: Tensors) -> Tensors:
        chosen = {f"{name}.weight": tensors.pop(f"{name}.weight") for name in linears(tensors)}
        every = {"weights": weights, "input_activations": inputs, "format": form}
        stored, numbers = compress_linears(chosen, {"Linear": every})
        tensors.update(stored)
        return numbers

    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    quantization = {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$", *(["re:.*kv_b_proj$"] if leaves_out_kv_b else [])],
    }  # fmt: skip
    write_all = without_kv_b(write) if leaves_out_kv_b else write
    decoder = load(store(full, tmp_path / "stored", quantization, lambda tensors: held.update(write_all(tensors))))
    of_held = load(store(full, tmp_path / "held", {}, lambda tensors: tensors.update(held)))
    assert rms_error(logits(decoder), logits(of_held)) < tolerance
    for ours, theirs in zip(decoder.layers, of_held.layers):
        assert isinstance(ours.attention, LatentAttention) and isinstance(theirs.attention, LatentAttention)
        torch.testing.assert_close(ours.attention.kv_b.matrix, theirs.attention.kv_b.matrix, rtol=1e-5, atol=1e-6)


def without_kv_b(write: Writer) -> Writer:
    """As the writer, but kv_b_proj keeps its plain numbers."""

    def write_others(tensors: Tensors) -> Tensors:
        kept = {name: tensors.pop(name) for name in list(tensors) if "kv_b_proj" in name}
        held = write(tensors)
        tensors.update(kept)
        return held

    return write_others


STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
LEFT_OUT: dict[str, tuple[dict[str, object], Writer, float]] = {
    "fp8-blocks": ({**BLOCKS, "modules_to_not_convert": ["kv_b_proj"]}, blocks, 0.15),
    "fp8-static": ({**STATIC, "modules_to_not_convert": ["kv_b_proj"]}, fp8("tensor", static=True), 0.15),
    "awq": ({**AWQ, "modules_to_not_convert": ["mlp.gate", "kv_b_proj"]}, awq(64), 1e-5),
    "gptq": ({**GPTQ, "dynamic": {r"-:.*kv_b_proj": {}}}, gptq(64, sym=True), 1e-5),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_an_up_projection_in_plain_numbers(full: Path, tmp_path: Path, name: str) -> None:
    """Beside other layers in each format, which the format's own list says."""
    quantization, write, tolerance = LEFT_OUT[name]
    held: Tensors = {}

    def write_both(tensors: Tensors) -> None:
        held.update(without_kv_b(write)(tensors))

    decoder = load(store(full, tmp_path / "stored", quantization, write_both))
    assert decoder.spec.stored_format is not None
    of_held = load(store(full, tmp_path / "held", {}, lambda tensors: tensors.update(held)))
    assert rms_error(logits(decoder), logits(of_held)) < tolerance
    before = load_file(full / "model.safetensors")
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer.attention, LatentAttention)
        assert torch.equal(layer.attention.kv_b.matrix, before[f"model.layers.{index}.self_attn.kv_b_proj.weight"])


@pytest.mark.parametrize("method", ["a8w8_fp8_wint4", "block_wise_fp8"])
def test_weights_quantised_at_load(full: Path, method: str) -> None:
    """All but kv_b, which keeps the checkpoint's numbers."""
    decoder, stored = load(full, quantization=method), load_file(full / "model.safetensors")
    assert 1e-4 < rms_error(logits(decoder), logits(load(full))) < 0.2
    attention = decoder.layers[1].attention
    assert isinstance(attention, LatentAttention)
    assert torch.equal(attention.kv_b.matrix, stored["model.layers.1.self_attn.kv_b_proj.weight"])


@pytest.mark.parametrize(
    "variant",
    [
        *("deepseek-v2", "deepseek-v2-lite", "deepseek-v2-halves"),
        *("deepseek-v3-halves", "deepseek-v3-null", "glm4-moe-lite"),
    ],
)
def test_deterministic_mode_is_the_same_model(variant: str, tmp_path: Path) -> None:
    """Whole and in chunks, Hugging Face's logits from absorbed rows alone."""
    checkpoint = make_checkpoint(variant, tmp_path)
    decoder = load(tmp_path, deterministic=True)
    assert isinstance(decoder.backend, InvariantLatent)
    for sizes in ([len(PROMPT)], [3, 1]):
        (ours,) = PagedForward(decoder, [PROMPT]).run(sizes)
        assert relative_error(ours, checkpoint.logits(PROMPT)) < 1e-4


def test_a_null_is_refused_where_hugging_face_refuses_it(tmp_path: Path) -> None:
    path = make_checkpoint("glm4-moe-lite", tmp_path).path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_interleave": None}))
    with pytest.raises(ConfigError, match=r"^config\.json rope_interleave=None: must be true or false"):
        load(tmp_path)
    with pytest.raises(StrictDataclassFieldValidationError, match="rope_interleave"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("variant", "fields", "named"),
    [
        ("deepseek-v3", {"n_group": 3}, "n_group=3: must divide n_routed_experts=8 into groups of at least 2"),
        ("deepseek-v3", {"n_group": 8}, "n_group=8: must divide n_routed_experts=8 into groups of at least 2"),
        ("deepseek-v2", {"topk_group": 5}, "topk_group=5: must be at most n_group=4"),
        (
            "deepseek-v2", {"num_experts_per_tok": 5},
            "num_experts_per_tok=5: must be at most 4, the experts of topk_group=2 of n_group=4 groups",
        ),
        ("deepseek-v3", {"n_routed_experts": 1028}, "n_routed_experts=1028: must be an integer of at most 1024"),
        ("glm4-moe-lite", {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7: must be even"),
    ],
)  # fmt: skip
def test_a_field_that_does_not_fit_others_is_named(
    variant: str, fields: dict[str, int], named: str, tmp_path: Path
) -> None:
    path = make_checkpoint(variant, tmp_path).path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ConfigError, match=rf"^config\.json {named}"):
        load(tmp_path)


def test_deterministic_mode_reads_stored_weights(full: Path, tmp_path: Path) -> None:
    """FP8 with a scale a tensor, kv_b as numbers; activations stay as they are. It has no products of blocks."""
    dynamic = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": KEPT}
    held: Tensors = {}
    folder = store(full, tmp_path / "stored", dynamic, lambda tensors: held.update(fp8("tensor")(tensors)))
    decoder = load(folder, deterministic=True)
    of_held = load(store(full, tmp_path / "held", {}, lambda tensors: tensors.update(held)))
    assert rms_error(logits(decoder), logits(of_held)) < 1e-4
    attention = decoder.layers[1].attention
    assert isinstance(attention, LatentAttention)
    expected = held["model.layers.1.self_attn.kv_b_proj.weight"]
    torch.testing.assert_close(attention.kv_b.matrix, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(
        ConfigError, match="quantization='block_wise_fp8': deterministic: block_wise_fp8 has no product"
    ):
        load(store(full, tmp_path / "blocks", BLOCKS, blocks), deterministic=True)


def test_fp8_rows(full: Path) -> None:
    decoder = load(full)
    plain = logits(decoder)
    (whole,), (chunked,) = (
        PagedForward(decoder, [PROMPT], kv_dtype=torch.float8_e4m3fn).run(sizes) for sizes in ([len(PROMPT)], [3, 1])
    )
    assert 1e-4 < rms_error(whole, plain) < 0.1
    assert relative_error(chunked, whole) < 1e-5


def test_an_mtp_module_in_the_stored_format(full: Path, tmp_path: Path) -> None:
    """FP8 blocks around an eh_proj in plain numbers, as DeepSeek-V3 has them; without a format, what they stand for."""
    shutil.copytree(full, tmp_path / "full")
    add_mtp(tmp_path / "full")
    held: Tensors = {}

    def write(tensors: Tensors) -> None:
        kept = {name: tensors.pop(name) for name in list(tensors) if name.endswith("eh_proj.weight")}
        held.update(blocks(tensors))
        tensors.update(kept)

    folders = (
        store(tmp_path / "full", tmp_path / "stored", BLOCKS, write),
        store(tmp_path / "full", tmp_path / "held", {}, lambda tensors: tensors.update(held)),
    )
    modules = [MTPModule.load(load(folder), folder, 64) for folder in folders]
    methods = [module.layer.attention.qkv.method.stored for module in modules]
    assert methods[0] is not None and methods[0].method == "block_wise_fp8" and methods[1] is None
    states = torch.randn(len(PROMPT), 128, generator=torch.Generator().manual_seed(3))
    found = []
    for module, folder in zip(modules, folders):
        forward = PagedForward(load(folder), [PROMPT], block_size=8)
        with torch.inference_mode():
            found.append(module.logits(module.forward(forward._batch({0: len(PROMPT)}), states, forward.kv_caches[0])))
    assert 1e-4 < rms_error(*found) < 0.15


def test_several_mtp_modules_are_behind_the_model(full: Path, tmp_path: Path) -> None:
    """The first one drafts. A layer behind the model's that is no such module is not passed over."""
    shutil.copytree(full, tmp_path / "two")
    add_mtp(tmp_path / "two")
    one = MTPModule.load(load(tmp_path / "two"), tmp_path / "two", 64)
    tensors = load_file(tmp_path / "two" / "model.safetensors")
    second = {name.replace(".2.", ".3.", 1): 2 * own for name, own in tensors.items() if ".layers.2." in name}
    save_file(tensors | second, tmp_path / "two" / "model.safetensors")
    decoder = load(tmp_path / "two")
    assert torch.equal(logits(decoder), logits(load(full)))
    first = MTPModule.load(decoder, tmp_path / "two", 64)
    assert torch.equal(first.norms["enorm"].weight, one.norms["enorm"].weight)
    shorter = json.loads((full / "config.json").read_text()) | {"num_hidden_layers": 1}
    (tmp_path / "two" / "config.json").write_text(json.dumps(shorter))
    with pytest.raises(ConfigError, match=r"tensors model\.layers\.1\..* unexpected"):
        load(tmp_path / "two")


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_static_scale_of_an_up_projection_s_inputs_has_no_use(
    full: Path, tmp_path: Path, is_deterministic: bool
) -> None:
    """As AutoFP8 stores DeepSeek-Coder-V2-Lite: a scale of the inputs of every linear layer, kv_b_proj's too."""
    static = {**STATIC, "ignored_layers": KEPT}
    held: Tensors = {}
    folder = store(full, tmp_path / "stored", static, lambda tensors: held.update(fp8("tensor", static=True)(tensors)))
    of_held = load(store(full, tmp_path / "held", {}, lambda tensors: tensors.update(held)))
    decoder = load(folder, deterministic=is_deterministic)
    assert rms_error(logits(decoder), logits(of_held)) < 0.15
    for ours, theirs in zip(decoder.layers, of_held.layers):
        assert isinstance(ours.attention, LatentAttention) and isinstance(theirs.attention, LatentAttention)
        torch.testing.assert_close(ours.attention.kv_b.matrix, theirs.attention.kv_b.matrix, rtol=1e-5, atol=1e-6)
