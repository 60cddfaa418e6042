"""AWQ, GPTQ and compressed-tensors checkpoints: read as the libraries that write them do, or refused by name.

The goldens of AWQ and GPTQ are what AutoAWQ 0.2.9 and GPTQModel 7.7.0 pack and dequantise: neither can be installed
beside what this project needs. compressed-tensors can, and writes its checkpoints here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import Tensors, linear_names, load, logits, make_full, rms_error, store
from safetensors.torch import load_file
from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.load import weight_bytes
from slipstream.nn.quant.int4 import Int4
from slipstream.nn.read_spec import read_spec
from slipstream.nn.stored_format import StoredFormat
from slipstream_kernels import ops

needs_library = pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="needs compressed-tensors (dev)")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
GROUPS4 = {**INT4, "strategy": "group", "group_size": 32}
TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True, "num_bits": 8}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_full(tmp_path_factory.mktemp("full"))


@pytest.mark.parametrize(
    ("golden", "stored", "zeros"),
    [
        ("awq_gemm", {"packing": "awq", "has_zeros": True}, "qzeros"),
        ("gptq", {"packing": "gptq", "has_zeros": True}, "qzeros"),
        ("gptq", {"packing": "gptq_v2", "has_zeros": True}, "qzeros_v2"),
        ("gptq_sym", {"packing": "gptq"}, "qzeros"),
        ("gptq_sym", {"packing": "gptq", "has_zeros": True}, "qzeros"),
        ("gptq_act_order", {"packing": "gptq", "has_zeros": True, "act_order": True}, "qzeros"),
        ("gptq", {"packing": "gptq", "has_zeros": True, "act_order": True}, "qzeros"),
    ],
)
def test_goldens(root: Path, golden: str, stored: dict[str, object], zeros: str) -> None:
    tensors = load_file(root / "tests" / "golden" / f"{golden}.safetensors")
    expected = tensors["dequantized"]
    rows, columns = expected.shape
    spec = LinearSpec(columns, (("first", rows), ("second", rows)))
    method = Int4(stored=StoredFormat("wint4", "group", group_size=32, **stored), group_size=32)  # type: ignore[arg-type]
    weights = method.create_weights(spec, torch.device("cpu"), torch.float32)
    for suffix in method.checkpoint_tensors(spec, rows):
        for part in range(2):
            tensor = tensors[zeros if suffix == "qzeros" else suffix]
            method.load(weights, suffix, slice(part * rows, (part + 1) * rows), tensor)
    x, weight = torch.eye(columns), method.finish(weights)
    torch.testing.assert_close(ops.linear(x, weight), torch.cat((expected, expected)).t(), rtol=2e-3, atol=1e-6)
    assert ("order" in weights) == (golden == "gptq_act_order")


def store_compressed(full: Path, folder: Path, weights: dict, inputs: dict | None, ignore=("lm_head",)) -> torch.Tensor:
    from stored_by_compressed_tensors import store_compressed as store_by_library

    return store_by_library(full, folder, weights, inputs, ignore)


@needs_library
@pytest.mark.parametrize(
    ("weights", "inputs", "method", "bound"),
    [
        ({**INT4, "strategy": "group", "group_size": 64}, None, "wint4", 1e-5),
        ({**INT4, "strategy": "group", "group_size": 32, "symmetric": False}, None, "wint4", 1e-5),
        ({**INT4, "strategy": "channel"}, None, "wint4", 1e-5),
        ({**INT4, "strategy": "group", "group_size": 128}, {**TOKEN, "type": "float"}, "w4a8_fp8", 1e-5),
        ({**INT8, "strategy": "channel"}, None, "wint8", 1e-5),
        # int8 rows are scaled by amax / 127 here, by amax / 127.5 there
        ({**INT8, "strategy": "channel"}, {**TOKEN, "type": "int"}, "w8a8_int8", 0.05),
        ({**INT8, "strategy": "tensor"}, {**INT8, "strategy": "tensor"}, "w8a8_int8", 0.05),
        ({**INT8, "type": "float", "strategy": "channel"}, {**TOKEN, "type": "float"}, "fp8", 1e-5),
    ],
)
def test_compressed_tensors(
    full: Path, tmp_path: Path, weights: dict[str, object], inputs: dict[str, object] | None, method: str, bound: float
) -> None:
    expected = store_compressed(full, tmp_path, weights, inputs)
    decoder = load(tmp_path)
    assert decoder.spec.stored_format is not None and decoder.spec.stored_format.method == method
    assert rms_error(logits(decoder), expected) < bound
    assert rms_error(expected, logits(load(full))) > 0.01


@needs_library
def test_head_that_is_stored_quantised(full: Path, tmp_path: Path) -> None:
    expected = store_compressed(full, tmp_path, GROUPS4, None, ())
    decoder = load(tmp_path)
    assert "packed" in decoder.lm_head.weights and rms_error(logits(decoder), expected) < 1e-5


@needs_library
def test_the_same_weights_beside_other_activations(full: Path, tmp_path: Path) -> None:
    store_compressed(full, tmp_path, GROUPS4, None)
    sixteen, eight = load(tmp_path), load(tmp_path, quantization="w4a8_fp8")
    assert eight.layers[0].attention.qkv.weights["packed"].equal(sixteen.layers[0].attention.qkv.weights["packed"])
    assert 0.01 < rms_error(logits(eight), logits(sixteen)) < 0.1
    for field, wish in (("quantization", "fp8"), ("quantization_group_size", 128)):
        with pytest.raises(ConfigError, match=f"{field}='?{wish}'?: the checkpoint"):
            load(tmp_path, **{field: wish})


def gptq(tensors: Tensors, act_order: bool = False) -> dict[str, torch.Tensor]:
    """Replace the linears by version 1 tensors; returns what they stand for."""
    held = {}
    for name in linear_names(tensors):
        weight = tensors.pop(f"{name}.weight")
        columns = weight.shape[1]
        seed = 5 if any(part in name for part in ("q_", "k_", "v_", "gate", "up")) else 6
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
        order = order if act_order else torch.arange(columns)
        made = ops.quantize_int4(weight[:, order], 32, has_zeros=True)
        assert made.zeros is not None
        codes, index = torch.empty_like(weight, dtype=torch.uint8), torch.empty(columns, dtype=torch.int32)
        codes[:, order] = ops.unpack_int4(made.packed)
        index[order] = (torch.arange(columns) // 32).int()
        held[f"{name}.weight"] = torch.empty_like(weight)
        held[f"{name}.weight"][:, order] = ops.dequantize_int4(made)
        tensors |= {
            f"{name}.qweight": ops.pack_int4(codes).view(torch.int32).t(),
            f"{name}.qzeros": ops.pack_int4(made.zeros.t().contiguous()).view(torch.int32) - 0x11111111,
            f"{name}.scales": made.scales.t(),
            f"{name}.g_idx": index,
        }
    return held


def test_the_plan_counts_an_order_of_input_features(full: Path, tmp_path: Path) -> None:
    path = store(full, tmp_path, {**GPTQ, "desc_act": True}, lambda tensors: gptq(tensors, act_order=True))
    decoder = load(path)
    planned = weight_bytes(ModelConfig(model=str(path), device="cpu"), decoder.spec, torch.float32)
    assert planned == sum(tensor.nbytes for tensor in decoder.tensors())


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("method", ["auto", "w4a8_fp8"])
def test_gptq_model(full: Path, tmp_path: Path, act_order: bool, method: str) -> None:
    held: Tensors = {}
    store(full, tmp_path / "gptq", {**GPTQ, "desc_act": act_order}, lambda t: held.update(gptq(t, act_order)))
    plain = store(full, tmp_path / "held", {}, lambda tensors: tensors.update(held))
    error = rms_error(logits(load(tmp_path / "gptq", quantization=method)), logits(load(plain)))
    assert error < 1e-5 if method == "auto" else 0.01 < error < 0.1


Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("fields", "change", "named"),
    [
        ({}, lambda t: t.pop(f"{DOWN}.qzeros"), f"tensor {DOWN}.qzeros missing"),
        ({}, lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"][:8]}), r"q_proj.qweight has shape \[8, 128\]"),
        ({}, lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].short()}), "qweight has type I16; accepted: I32"),
        ({"group_size": 64}, lambda t: None, r"qzeros has shape \[12, 16\], config.json implies \[6, 16\]"),
        ({"sym": True}, lambda t: None, "q_proj.qzeros holds zero-points other than 8"),
        ({}, lambda t: t[f"{Q}.g_idx"].fill_(1), "q_proj.g_idx does not put 32 input features into each group"),
        ({}, lambda t: t[f"{Q}.g_idx"].copy_(t[f"{Q}.g_idx"].flip(0)), "g_idx is not in order"),
        (
            {"desc_act": True},
            lambda t: t[f"{Q}.g_idx"].copy_(t[f"{Q}.g_idx"].flip(0)),
            "k_proj.g_idx differs from that of a part",
        ),
    ],
)
def test_broken_checkpoint_is_named(
    full: Path, tmp_path: Path, fields: dict[str, object], change: Callable[[Tensors], object], named: str
) -> None:
    def broken(tensors: Tensors) -> None:
        gptq(tensors)
        change(tensors)

    with pytest.raises(ConfigError, match=named):
        load(store(full, tmp_path, {**GPTQ, **fields}, broken))


def test_indices_may_be_absent_where_they_say_nothing(full: Path, tmp_path: Path) -> None:
    def without(tensors: Tensors) -> None:
        gptq(tensors)
        for name in [name for name in tensors if name.endswith("g_idx")]:
            del tensors[name]

    assert logits(load(store(full, tmp_path / "some", GPTQ, without))).isfinite().all()
    with pytest.raises(ConfigError, match=r"g_idx, .* missing"):
        load(store(full, tmp_path / "none", {**GPTQ, "desc_act": True}, without))


def test_biases_of_zeros_are_read_where_the_model_has_none(full: Path, tmp_path: Path) -> None:
    """Old versions of AutoGPTQ store a bias for each linear layer."""

    def with_biases(value: float) -> Callable[[Tensors], None]:
        def change(tensors: Tensors) -> None:
            gptq(tensors)
            for name in linear_names(full_tensors):
                tensors.setdefault(f"{name}.bias", torch.full_like(full_tensors[f"{name}.weight"][:, 0], value))

        return change

    full_tensors = load_file(full / "model.safetensors")
    expected = logits(load(store(full, tmp_path / "without", GPTQ, gptq)))
    assert torch.equal(logits(load(store(full, tmp_path / "zeros", GPTQ, with_biases(0.0)))), expected)
    with pytest.raises(ConfigError, match=r"_proj\.bias is not zero, and config\.json implies no such bias; accepted"):
        load(store(full, tmp_path / "ones", GPTQ, with_biases(1.0)))


def group(weights: dict[str, object], inputs: dict[str, object] | None, **fields: object) -> dict[str, object]:
    parts = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    common = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    return {**common, "config_groups": {"group_0": parts}, **fields}


CHANNEL4, CHANNEL8 = {**INT4, "strategy": "channel"}, {**INT8, "strategy": "channel"}
ONLINE = {"targets": ["re:.*down_proj$"], "location": "input"}
ROTATIONS = {"config_groups": {"R4": {"type": "hadamard", "apply": [ONLINE]}}}  # as SpinQuant writes it


def with_outputs(stored: dict[str, object]) -> dict[str, object]:
    """Quantised outputs too, as of attention's q, k and v."""
    parts = stored["config_groups"]["group_0"]
    return {**stored, "config_groups": {"group_0": {**parts, "output_activations": {**TOKEN, "type": "int"}}}}


def test_rotations_and_outputs_that_say_nothing_are_read(full: Path, tmp_path: Path) -> None:
    stored = group(CHANNEL4, None, transform_config={})
    stored["config_groups"]["group_0"]["output_activations"] = None
    store(full, tmp_path, stored, lambda tensors: None)
    assert read_spec(tmp_path).stored_format.method == "wint4"


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ({**AWQ, "bits": 8}, "bits=8: must be 4"),
        ({**AWQ, "version": "gemv"}, "version='gemv'.*gemm"),
        ({**AWQ, "zero_point": False}, "zero_point=False: must be true"),
        ({**AWQ, "group_size": 0}, "group_size=0: must be -1 or"),
        ({**AWQ, "modules_to_not_convert": ["layers.1.mlp.up_proj"]}, "leaves model.layers.1.mlp.up_proj"),
        ({**GPTQ, "bits": 3}, "bits=3: must be 4"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'.*gptq, gptq_v2"),
        ({**GPTQ, "dynamic": {"-:.*k_proj": {}}}, "dynamic=.*as one"),
        (group({**INT8, "strategy": "group", "group_size": 128}, None), "strategy='group'.*tensor, channel"),
        (group({**CHANNEL8, "symmetric": False}, None), "symmetric=False: must be true"),
        (group(CHANNEL4, {**TOKEN, "type": "int"}), "num_bits=4: int 4 with activations int 8 is not served"),
        (group(CHANNEL4, {**TOKEN, "type": "float", "dynamic": False, "strategy": "tensor"}), "dynamic=False"),
        (group({**INT4, "num_bits": 3, "strategy": "channel"}, None), "int 3 with activations none"),
        (group(CHANNEL4, None, format="marlin-24"), "format='marlin-24'"),
        (group(CHANNEL4, None, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config format="),
        (
            group(CHANNEL4, None, transform_config=ROTATIONS),
            r"transform_config=.*rotations .* accepted: absent or empty",
        ),
        (with_outputs(group(CHANNEL4, None)), r"group_0 output_activations=.* accepted: absent or null"),
        (group(CHANNEL4, None, ignore=["re:.*gate_proj"]), "leaves model.layers.0.mlp.gate_proj"),
    ],
)
def test_unserved_format_is_refused(full: Path, tmp_path: Path, stored: dict[str, object], named: str) -> None:
    store(full, tmp_path, stored, lambda tensors: None)
    with pytest.raises(ConfigError, match=named):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"intermediate_size": 380}, "gate has 380 outputs"), ({"hidden_size": 120}, "q, k, v has 120 inputs")],
)
def test_sizes_that_words_do_not_divide(tmp_path: Path, fields: dict[str, int], named: str) -> None:
    source = make_full(tmp_path / "full", **fields)
    with pytest.raises(ConfigError, match=f"{named}, not a multiple of"):
        load(store(source, tmp_path / "gptq", GPTQ, lambda tensors: None))
