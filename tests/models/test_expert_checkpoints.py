"""Quantised Mixtral checkpoints in the layouts in which they are published: read exactly, or refused before loading."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import Tensors, linear_names, load, logits, rms_error, store
from safetensors.torch import load_file, save_file
from slipstream.core.errors import ConfigError
from slipstream.nn.decoder import Decoder
from slipstream.nn.experts import Experts
from slipstream.nn.read_spec import read_spec
from slipstream_kernels import ops
from stored_experts import E4M3, ROUTERS, Writer, awq, fp8, gptq, int8, linears, make_mixtral, write_modelopt_config

needs_library = pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="needs compressed-tensors (dev)")
AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True,
    "modules_to_not_convert": ["gate"],
}  # fmt: skip
GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True, "damp_percent": 0.1,
    "modules_in_block_to_quantize": [["self_attn.k_proj"], ["block_sparse_moe.experts.0.w1"]],
}  # fmt: skip
DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head", *ROUTERS]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head", *ROUTERS]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "model.layers.*.gate*"]}
INT4, INT8 = {"num_bits": 4, "type": "int"}, {"num_bits": 8, "type": "int"}
FLOAT8 = {"num_bits": 8, "type": "float"}
TOKENS = {**FLOAT8, "strategy": "token", "dynamic": True}


def compressed(form: str, weights: dict[str, object], inputs: dict[str, object] | None) -> dict[str, object]:
    """As llm-compressor stores it: the routers are listed one by one."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    groups = {"group_0": group}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head", *ROUTERS]
    }  # fmt: skip


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixtral(tmp_path_factory.mktemp("mixtral"))


def store_both(full: Path, folder: Path, quantization: dict[str, object], write: Writer) -> tuple[Path, Path]:
    """(the quantised checkpoint, an unquantised one of what it stands for)."""
    held: Tensors = {}
    stored = store(full, folder / "stored", quantization, lambda tensors: held.update(write(tensors)))
    return stored, store(full, folder / "held", {}, lambda tensors: tensors.update(held))


def experts_of(decoder: Decoder, layer: int = 0) -> Experts:
    experts = decoder.layers[layer].mlp
    assert isinstance(experts, Experts)
    return experts


LAYOUTS: dict[str, tuple[dict[str, object], Writer]] = {
    "awq": (AWQ, awq(64)),
    "gptq": (GPTQ, gptq(64, sym=True)),
    "gptq-zeros": ({**GPTQ, "sym": False}, gptq(64, sym=False)),
    "gptq-v2": ({**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, gptq(64, sym=False, version=2)),
    "gptq-channel": ({**GPTQ, "group_size": -1}, gptq(0, sym=True)),
    "gptq-channel-act-order": ({**GPTQ, "group_size": -1, "desc_act": True}, gptq(0, sym=True, desc_act=True)),
    "gptq-act-order": ({**GPTQ, "desc_act": True}, gptq(64, sym=True, desc_act=True)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_bits(full: Path, tmp_path: Path, layout: str) -> None:
    stored, held = store_both(full, tmp_path, *LAYOUTS[layout])
    expected = logits(load(held))
    assert rms_error(logits(load(stored)), expected) < 1e-5
    assert rms_error(expected, logits(load(full))) > 0.05
    assert 0.01 < rms_error(logits(load(stored, quantization="w4a8_fp8")), expected) < 0.15


FLOATS: dict[str, tuple[dict[str, object], Writer]] = {
    "fp8-dynamic": (DYNAMIC, fp8("tensor")),
    "fp8-static": (STATIC, fp8("tensor", static=True)),
    "modelopt": (MODELOPT, fp8("tensor", static=True)),
    "compressed-tensors-dynamic": (
        compressed("float-quantized", {**FLOAT8, "strategy": "channel"}, TOKENS), fp8("channel")
    ),
    "compressed-tensors-static": (
        compressed("float-quantized", {**FLOAT8, "strategy": "tensor"}, {**FLOAT8, "strategy": "tensor"}),
        fp8("tensor", static=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", FLOATS)
def test_eight_bit_floats(full: Path, tmp_path: Path, layout: str) -> None:
    """All experts' products of a layer are of rows of one scale: the widest of the stored ones, or each row's own."""
    stored, held = store_both(full, tmp_path, *FLOATS[layout])
    decoder, tensors = load(stored), load_file(held / "model.safetensors")
    assert rms_error(logits(decoder), logits(load(held))) < 0.15
    torch.manual_seed(1)
    x, routing = torch.randn(6, 128), ops.route_experts(torch.randn(6, 4), 2)
    scale = x.abs().amax(1, keepdim=True) / 448
    inner = [name for name in linears(tensors) if name.startswith("model.layers.0.") and name.endswith(("w1", "w3"))]
    if "static" in layout or layout == "modelopt":
        of_stored = load_file(stored / "model.safetensors")
        scale = torch.stack([of_stored[f"{name}.input_scale"] for name in inner]).max()
    seen = (x / scale).clamp(-448, 448).to(E4M3).float() * scale
    ours = experts_of(decoder).gate_up.apply_grouped(x, routing, by_token=True)
    for row, token in enumerate(routing.tokens.tolist()):
        expert = int((routing.offsets <= row).sum()) - 1
        module = f"model.layers.0.block_sparse_moe.experts.{expert}"
        weight = torch.cat([tensors[f"{module}.w1.weight"], tensors[f"{module}.w3.weight"]])
        torch.testing.assert_close(ours[row], weight @ seen[token], rtol=1e-3, atol=1e-3)


def test_experts_that_no_calibration_reached_have_no_say_in_the_scale(full: Path, tmp_path: Path) -> None:
    stored, _ = store_both(full, tmp_path, *FLOATS["fp8-static"])
    expected, tensors = logits(load(stored)), load_file(stored / "model.safetensors")
    for name in ("w1", "w2", "w3"):
        tensors[f"model.layers.0.block_sparse_moe.experts.0.{name}.input_scale"].zero_()
    save_file(tensors, stored / "model.safetensors")
    assert torch.equal(logits(load(stored)), expected)


SCHEMES: dict[str, tuple[dict[str, object], dict[str, object] | None, str, str]] = {
    "w4a16-groups": ({**INT4, "strategy": "group", "group_size": 64}, None, "pack-quantized", "wint4"),
    "w4a16-zeros": (
        {**INT4, "strategy": "group", "group_size": 128, "symmetric": False}, None, "pack-quantized", "wint4"
    ),
    "w4a16-channels": ({**INT4, "strategy": "channel"}, None, "pack-quantized", "wint4"),
    "w4a8": ({**INT4, "strategy": "group", "group_size": 128}, TOKENS, "pack-quantized", "w4a8_fp8"),
    "w4a8-bytes": ({**INT4, "strategy": "group", "group_size": 128}, TOKENS, "int-quantized", "w4a8_fp8"),
    "fp8": ({**FLOAT8, "strategy": "channel"}, TOKENS, "float-quantized", "fp8"),
    "w8a16": ({**INT8, "strategy": "channel"}, None, "pack-quantized", "wint8"),
}  # fmt: skip


@needs_library
@pytest.mark.parametrize("scheme", SCHEMES)
def test_written_by_compressed_tensors(full: Path, tmp_path: Path, scheme: str) -> None:
    from stored_by_compressed_tensors import compress_linears

    weights, inputs, form, method = SCHEMES[scheme]

    def write(tensors: Tensors) -> Tensors:
        chosen = {f"{name}.weight": tensors.pop(f"{name}.weight") for name in linears(tensors)}
        every = {"weights": weights, "input_activations": inputs, "format": form}
        stored, held = compress_linears(chosen, {"Linear": every})
        tensors.update(stored)
        return held

    made, held = store_both(full, tmp_path, compressed(form, weights, inputs), write)
    decoder = load(made)
    assert decoder.spec.has_experts and decoder.spec.expert_format == decoder.spec.stored_format
    assert decoder.spec.stored_format is not None and decoder.spec.stored_format.method == method
    assert rms_error(logits(decoder), logits(load(held))) < (1e-5 if inputs is None else 0.15)


def test_scales_of_another_tool_beside_config(full: Path, tmp_path: Path) -> None:
    """ModelOpt's older exports say in a file of their own what config.json says today."""
    plain, _ = store_both(full, tmp_path, MODELOPT, fp8("tensor", static=True))
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"]
    expected = logits(load(plain))
    (plain / "config.json").write_text(json.dumps(config))
    lists = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": MODELOPT["ignore"]}
    write_modelopt_config(plain, lists)
    assert torch.equal(logits(load(plain)), expected)
    write_modelopt_config(plain, {**lists, "quant_algo": "W4A8_AWQ"})
    with pytest.raises(ConfigError, match="quant_algo='W4A8_AWQ': not supported; accepted: FP8"):
        read_spec(plain)


W8A8 = compressed("int-quantized", {**INT8, "strategy": "channel"}, {**INT8, "strategy": "token", "dynamic": True})
BLOCKS = {**DYNAMIC, "weight_block_size": [128, 128]}
BY_BLOCKS = {**FLOAT8, "strategy": "block", "block_structure": [128, 128]}
GROUPS = {**FLOAT8, "strategy": "group", "group_size": 128, "dynamic": True}
ACT_ORDER = {**GPTQ, "desc_act": True}


@pytest.mark.parametrize(
    ("quantization", "write", "method"),
    [
        (W8A8, int8, "w8a8_int8"),
        (BLOCKS, fp8("block", "weight_scale_inv"), "block_wise_fp8"),
        (compressed("float-quantized", BY_BLOCKS, GROUPS), fp8("block"), "block_wise_fp8"),
    ],
    ids=["w8a8", "deepseek", "compressed-tensors-blocks"],
)
def test_eight_bits_in_other_forms(
    full: Path, tmp_path: Path, quantization: dict[str, object], write: Writer, method: str
) -> None:
    stored, held = store_both(full, tmp_path, quantization, write)
    decoder = load(stored)
    assert decoder.spec.expert_format is not None and decoder.spec.expert_format.method == method
    expected = logits(load(held))
    assert rms_error(logits(decoder), expected) < (0.05 if method == "w8a8_int8" else 0.1)
    assert rms_error(expected, logits(load(full))) > 0.005
    weights, tensors = experts_of(decoder, 1).down.weights, load_file(held / "model.safetensors")
    of_one = tensors["model.layers.1.block_sparse_moe.experts.2.w2.weight"]
    rows = slice(2 * 128, 3 * 128)
    if method == "w8a8_int8":
        ours = weights["values"][rows].float() * weights["scales"][rows, None]
        assert rms_error(logits(load(stored, quantization="wint8")), expected) < 1e-5
    else:
        ours = weights["weight"][rows].float() * weights["scale"][2:3, :2].repeat_interleave(128, 1)
    torch.testing.assert_close(ours, of_one)


DOWN, UP = (f"model.layers.1.block_sparse_moe.experts.2.{name}" for name in ("w2", "w3"))


@pytest.mark.parametrize(
    ("quantization", "write", "damage", "named"),
    [
        (AWQ, awq(64), lambda t: t.pop(f"{DOWN}.qzeros"), f"{DOWN}.qzeros missing from the checkpoint$"),
        (
            AWQ, awq(64), lambda t: t.update({f"{DOWN}.scales": t[f"{DOWN}.scales"][:3]}),
            rf"{DOWN}.scales has shape \[3, 128\], config.json implies \[4, 128\]",
        ),
        (GPTQ, gptq(64, sym=False), lambda t: None, r"w\d.qzeros holds zero-points other than 8|proj.qzeros holds"),
        (GPTQ, gptq(64, True), lambda t: t[f"{DOWN}.g_idx"].fill_(0), f"{DOWN}.g_idx does not put 64 input features"),
        (
            ACT_ORDER, gptq(64, True, desc_act=True), lambda t: t.update({f"{UP}.g_idx": t[f"{UP}.g_idx"].flip(0)}),
            f"{UP}.g_idx differs from that of a part which is multiplied together with it",
        ),
        (STATIC, fp8("tensor", static=True), lambda t: t.pop(f"{DOWN}.input_scale"), f"{DOWN}.input_scale missing"),
        (STATIC, fp8("tensor"), lambda t: None, "input_scale, .* missing"),
        (
            STATIC, fp8("tensor", static=True), lambda t: t[f"{DOWN}.input_scale"].neg_(),
            f"{DOWN}.input_scale is no finite number of at least 0",
        ),
        (
            STATIC, fp8("tensor", static=True), lambda t: t[f"{DOWN}.input_scale"].fill_(float("nan")),
            f"{DOWN}.input_scale is no finite number of at least 0",
        ),
        (
            STATIC, fp8("tensor", static=True),
            lambda t: [scale.zero_() for name, scale in t.items() if name.endswith("w2.input_scale")],
            r"w2\.\w+ is of a layer whose input scales are all 0; accepted: one above 0",
        ),
        (DYNAMIC, fp8("tensor", static=True), lambda t: None, "input_scale, .* unexpected"),
        (
            DYNAMIC, fp8("tensor"), lambda t: t.update({f"{DOWN}.weight": t[f"{DOWN}.weight"].float()}),
            f"{DOWN}.weight has type F32; accepted: F8_E4M3",
        ),
        (
            DYNAMIC, fp8("tensor"), lambda t: t.update({f"{ROUTERS[1]}.weight": t[f"{ROUTERS[1]}.weight"].to(E4M3)}),
            f"{ROUTERS[1]}.weight has type F8_E4M3; accepted: F32",
        ),
        (
            AWQ, awq(64), lambda t: t.update({f"{ROUTERS[0]}.qweight": t.pop(f"{ROUTERS[0]}.weight").int()}),
            f"{ROUTERS[0]}.weight missing from the checkpoint; of that module it has tensor {ROUTERS[0]}.qweight",
        ),
        (
            AWQ, awq(64), lambda t: t.update({f"{DOWN}.weight": torch.zeros(128, 256), f"{DOWN}.qweight": None}),
            f"{DOWN}.qweight missing from the checkpoint; of that module it has .*{DOWN}.weight",
        ),
    ],
)  # fmt: skip
def test_broken_checkpoint_is_named(
    full: Path, tmp_path: Path, quantization: dict[str, object], write: Writer, damage, named: str
) -> None:
    def broken(tensors: Tensors) -> None:
        write(tensors)
        damage(tensors)
        for name in [name for name, tensor in tensors.items() if tensor is None]:
            del tensors[name]

    with pytest.raises(ConfigError, match=named):
        load(store(full, tmp_path, quantization, broken))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"modules_to_not_convert": ["gate", "experts.3"]}, r"modules_to_not_convert=.* leaves .*experts\.3\.w1 unq"),
        ({"modules_to_not_convert": ["layers.1.self_attn.v_proj"]}, r"leaves .*1\.self_attn\.v_proj unquant"),
        ({"bits": 8}, "bits=8: must be 4"),
    ],
)
def test_unserved_lists(full: Path, tmp_path: Path, fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_spec(store(full, tmp_path, {**AWQ, **fields}, lambda tensors: None))


def test_attention_may_be_left_unquantised(full: Path, tmp_path: Path) -> None:
    def experts_alone(tensors: Tensors) -> Tensors:
        attention = {f"{name}.weight": tensors.pop(f"{name}.weight") for name in linear_names(tensors)}
        held = awq(64)(tensors)
        tensors.update(attention)
        return held

    lists = {**AWQ, "modules_to_not_convert": ["gate", "self_attn"]}
    stored, held = store_both(full, tmp_path, lists, experts_alone)
    decoder = load(stored)
    assert rms_error(logits(decoder), logits(load(held))) < 1e-5
    assert "packed" in experts_of(decoder).down.weights and decoder.spec.stored_format is None
    for field, wish, named in (
        ("quantization", "fp8", "experts in wint4, other layers in none; accepted: auto"),
        ("quantization_group_size", 128, "the checkpoint has 64"),
    ):
        with pytest.raises(ConfigError, match=named):
            load(stored, **{field: wish})


@needs_library
def test_experts_of_a_group_of_their_own(full: Path, tmp_path: Path) -> None:
    """4-bit experts beside FP8 attention, as `a8w8_fp8_wint4` makes them at load."""
    from stored_by_compressed_tensors import compress_linears

    schemes = {
        r"re:.*self_attn\.(q|k|v|o)_proj$": {"weights": {**FLOAT8, "strategy": "channel"}, "format": "float-quantized"},
        r"re:.*experts\.\d+\.w[123]$": {
            "weights": {**INT4, "strategy": "group", "group_size": 128}, "format": "pack-quantized"
        },
    }  # fmt: skip
    schemes = {target: {**scheme, "input_activations": TOKENS} for target, scheme in schemes.items()}

    def write(tensors: Tensors) -> Tensors:
        chosen = {f"{name}.weight": tensors.pop(f"{name}.weight") for name in linears(tensors)}
        stored, held = compress_linears(chosen, schemes)
        tensors.update(stored)
        return held

    groups = {f"group_{n}": {"targets": [t], **schemes[t]} for n, t in enumerate(schemes)}
    mixed = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups, "ignore": []}
    stored, held = store_both(full, tmp_path, mixed, write)
    decoder = load(stored)
    assert rms_error(logits(decoder), logits(load(held))) < 0.15
    assert decoder.layers[0].attention.o.weights["weight"].dtype == E4M3
    assert torch.equal(logits(load(stored, quantization="a8w8_fp8_wint4")), logits(decoder))
    with pytest.raises(ConfigError, match="quantization='w4a8_fp8': the checkpoint stores experts in w4a8_fp8, other"):
        load(stored, quantization="w4a8_fp8")
    del groups["group_1"]["format"]
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**config, "quantization_config": mixed}))
    with pytest.raises(ConfigError, match="format='mixed-precision': not supported; accepted: pack-quantized"):
        read_spec(stored)


def test_shards_in_any_order(full: Path, tmp_path: Path) -> None:
    """A layer's experts lie in several files, as large checkpoints are cut."""
    stored, held = store_both(full, tmp_path, AWQ, awq(64))
    tensors = load_file(stored / "model.safetensors")
    weight_map = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, stored / file)
    (stored / "model.safetensors").unlink()
    (stored / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert rms_error(logits(load(stored)), logits(load(held))) < 1e-5
