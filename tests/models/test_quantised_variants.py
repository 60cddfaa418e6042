"""quantization_config as published quantised variants have it: which method serves it, or the reason why none does.

Configs alone; that the weights are read right is tested per format (test_checkpoints.py, test_expert_checkpoints.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from published_configs import PUBLISHED
from slipstream.core.errors import ConfigError
from slipstream.nn.read_spec import read_spec


def compressed(
    stored: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    common = {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": group}}
    return {**common, "ignore": ["lm_head"], **more}


TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False, "symmetric": True}
STATIC = {**TOKEN, "strategy": "tensor", "dynamic": False}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "symmetric": True}
GROUPS = {**TOKEN, "strategy": "group", "group_size": 128}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "lm_head": False,
        "checkpoint_format": "gptq", "pack_dtype": "int32", "true_sequential": True, "meta": {}}  # fmt: skip
QWEN_ROUTERS = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(48))]
GLM_ROUTERS = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(1, 46)), "model.layers.46.eh_proj"]
R1 = "DeepSeek-R1-Distill-Llama-8B"

# variant -> (the model that was quantised, its quantization_config, method)
SERVED = {
    "Qwen3-30B-A3B-FP8": ("Qwen3-30B-A3B", {**BLOCK, "modules_to_not_convert": QWEN_ROUTERS}, "block_wise_fp8"),
    "Qwen3-30B-A3B-GPTQ-Int4": ("Qwen3-30B-A3B", GPTQ, "wint4"),
    "Qwen3-30B-A3B-AWQ": ("Qwen3-30B-A3B", {**AWQ, "modules_to_not_convert": ["gate"]}, "wint4"),
    "GPTQ with modules left out": (
        "Qwen3-30B-A3B", {**GPTQ, "dynamic": {r"-:.*\.mlp\.gate$": {}}}, "wint4"
    ),
    "DeepSeek-V2-Lite AWQ": ("DeepSeek-V2-Lite", {**AWQ, "group_size": 64, "modules_to_not_convert": None}, "wint4"),
    "DeepSeek-V3 GPTQ": ("DeepSeek-V3", {**GPTQ, "desc_act": True}, "wint4"),
    "GLM-4.7-Flash w4a16, kv_b_proj left out": (
        "GLM-4.7-Flash", compressed("pack-quantized", INT4, ignore=["lm_head", "re:.*kv_b_proj$"]), "wint4"
    ),
    "Kimi-K2.6-FP8-BLOCK": (
        "DeepSeek-V3",
        compressed("float-quantized", BLOCKS, GROUPS, ignore=[
            "re:.*mlp.gate$", "re:.*lm_head", "re:.*kv_a_proj_with_mqa$", "re:.*q_a_proj$", "re:.*norm$"
        ]),
        "block_wise_fp8",
    ),
    "Qwen1.5-MoE-A2.7B-Chat-GPTQ-Int4": ("Qwen1.5-MoE-A2.7B", GPTQ, "wint4"),
    "int4 of groups of 32, as Kimi K2.5's": (
        "Qwen3-30B-A3B", compressed("pack-quantized", {**INT4, "group_size": 32}, ignore=["lm_head", "re:.*mlp.gate$"]),
        "wint4",
    ),
    "GLM-4.5-Air-FP8": (
        "GLM-4.5-Air", compressed("float-quantized", FP8, TOKEN, ignore=GLM_ROUTERS), "fp8"
    ),
    "MiniMax-M2": (
        "MiniMax-M2", {**BLOCK, "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        "block_wise_fp8",
    ),
    "R1-Distill-Llama-8B w4a16": (R1, compressed("pack-quantized", {**INT4, "actorder": "weight"}), "wint4"),
    "R1-Distill-Llama-8B FP8-dynamic": (R1, compressed("float-quantized", FP8, TOKEN), "fp8"),
    "R1-Distill-Llama-8B w8a8": (
        R1, compressed("int-quantized", {**FP8, "type": "int"}, {**TOKEN, "type": "int"}), "w8a8_int8"
    ),
    "R1-Distill-Llama-8B ModelOpt": (R1, {"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
    "as Llama-3.1-405B-FP8, attention and a first layer in 16 bits": (
        R1,
        {
            "quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": [
                "lm_head", *(f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")),
                *(f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(32) for part in "qkvo"),
            ],
        },
        "fp8",
    ),
    "R1-Distill-Qwen-1.5B AWQ": ("DeepSeek-R1-Distill-Qwen-1.5B", AWQ, "wint4"),
    "Mistral-Small-24B FP8": (
        "Mistral-Small-24B-Instruct-2501", compressed("float-quantized", {**FP8, "strategy": "tensor"}, STATIC), "fp8"
    ),
    "phi-4 AWQ": ("phi-4", AWQ, "wint4"),
    "phi-4 w4a16": ("phi-4", compressed("pack-quantized", INT4), "wint4"),
    "GLM-4-9B-0414 GPTQ": ("GLM-4-9B-0414", GPTQ, "wint4"),
    "gemma-2-9b FP8": ("gemma-2-9b", compressed("float-quantized", FP8, TOKEN), "fp8"),
    "gemma-3-1b w4a16": ("gemma-3-1b-it", compressed("pack-quantized", INT4), "wint4"),
    "Baichuan2-13B GPTQ, W_pack as one": ("Baichuan2-13B-Chat", GPTQ, "wint4"),
    "chatglm3-6b GPTQ": ("chatglm3-6b", GPTQ, "wint4"),
}  # fmt: skip
REFUSED = {
    "Baichuan2-13B-Chat-4bits": (
        "Baichuan2-13B-Chat", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "quant_method=None: is missing"
    ),
    "bitsandbytes": (R1, {"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes': not supported; accepted: awq"),
    "NVFP4 by ModelOpt": (R1, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4'.*accepted: FP8"),
    "NVFP4 by compressed-tensors": (R1, compressed("nvfp4-pack-quantized", NVFP4), "format='nvfp4-pack-quantized'"),
    "W4AFP8": ("Qwen3-30B-A3B", {"quant_method": "w4afp8"}, "quant_method='w4afp8': not supported"),
    "GPTQ-Int8": (R1, {**GPTQ, "bits": 8}, "bits=8: must be 4"),
    "GPTQ-Int3": (R1, {**GPTQ, "bits": 3}, "bits=3: must be 4"),
    "GPTQ with a part of a product left out": (
        "Qwen3-30B-A3B", {**GPTQ, "dynamic": {r"-:.*\.v_proj$": {}}}, "leaves .*v_proj unquantised, not"
    ),
    "GPTQ with dynamic rules": (
        "Qwen3-30B-A3B", {**GPTQ, "dynamic": {"+:.*down_proj": {"bits": 8}}}, "dynamic=.*formats of their own"
    ),
    "a list with what is no pattern": (
        R1, compressed("pack-quantized", INT4, ignore=["re:["]), r"ignore=.* 're:.*' is not a regular expression"
    ),
    "a target that is no pattern": (
        R1, {**compressed("pack-quantized", INT4), "config_groups": {"group_0": {"targets": ["re:("]}}},
        r"group_0 targets=\['re:\('\]: .* is not a regular expression: missing \)",
    ),
    "a rule that is no pattern": (R1, {**GPTQ, "dynamic": {"-:(": {}}}, "dynamic=.* is not a regular expression"),
    "AWQ for GEMV": (R1, {**AWQ, "version": "gemv"}, "version='gemv': not supported; accepted: gemm"),
    "auto-round": (R1, {"quant_method": "auto-round", "bits": 4}, "quant_method='auto-round': not supported"),
    "HQQ": (R1, {"quant_method": "hqq"}, "quant_method='hqq': not supported"),
    "EXL2": (R1, {"quant_method": "exl2", "bits": 4.0}, "quant_method='exl2': not supported"),
    "torchao": (R1, {"quant_method": "torchao"}, "quant_method='torchao': not supported"),
}  # fmt: skip


def write(folder: Path, model: str, quantization: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps({**PUBLISHED[model][0], "quantization_config": quantization}))
    return folder


@pytest.mark.parametrize("variant", SERVED)
def test_the_method_that_serves_it(variant: str, tmp_path: Path) -> None:
    model, quantization, method = SERVED[variant]
    spec = read_spec(write(tmp_path, model, quantization))
    assert spec.stored_format is not None and spec.stored_format.method == method
    assert not spec.stored_format.quantized_head
    assert spec.num_parameters == PUBLISHED[model][1]


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"])
def test_experts_alone_as_kimi_has_them(architecture: str, tmp_path: Path) -> None:
    """K2 Thinking, and K2.5 that also sees, whose text_config says so."""
    left_out = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    experts = compressed("pack-quantized", {**INT4, "group_size": 32, "actorder": None}, ignore=left_out)
    write(tmp_path, "DeepSeek-V3", experts)
    if architecture.startswith("Kimi"):
        whole = {"architectures": [architecture], "text_config": json.loads((tmp_path / "config.json").read_text())}
        (tmp_path / "config.json").write_text(json.dumps(whole))
    spec = read_spec(tmp_path)
    assert spec.stored_format is None and {layer.plain for layer in spec.layers} == {frozenset()}
    assert spec.expert_format is not None and (spec.expert_format.method, spec.expert_format.group_size) == (
        "wint4",
        32,
    )


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("form", ["{}", "re:{}$"])
def test_names_of_modules_in_models_that_also_see(prefix: str, form: str, tmp_path: Path) -> None:
    """As llm-compressor lists them: by their whole names, the head's too."""
    left_out = [form.format(f"{prefix}layers.{layer}.mlp.down_proj") for layer in range(40)]
    fp8 = compressed("float-quantized", FP8, TOKEN, ignore=[*left_out, "language_model.lm_head", "re:vision_tower.*"])
    text = PUBLISHED["Mistral-Small-24B-Instruct-2501"][0]
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text, "quantization_config": fp8}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    spec = read_spec(tmp_path)
    assert {layer.plain for layer in spec.layers} == {frozenset({"down"})}
    assert spec.stored_format is not None and not spec.stored_format.quantized_head


@pytest.mark.parametrize("variant", REFUSED)
def test_the_reason_why_none_does(variant: str, tmp_path: Path) -> None:
    model, quantization, reason = REFUSED[variant]
    with pytest.raises(ConfigError, match=reason):
        read_spec(write(tmp_path, model, quantization))


OLD_AWQ = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("quantize_config.json", {**GPTQ, "quant_method": None}, ("wint4", "gptq", 128)),
        ("quantize_config.json", {**GPTQ, "quant_method": "gptq", "group_size": -1}, ("wint4", "gptq", 0)),
        ("quant_config.json", OLD_AWQ, ("wint4", "awq", 64)),
        ("compression_config", compressed("pack-quantized", INT4), ("wint4", "compressed-tensors", 128)),
        (
            "compression_config", {**compressed("pack-quantized", INT4), "quant_method": None},
            ("wint4", "compressed-tensors", 128),
        ),
    ],
)  # fmt: skip
def test_older_tools_say_it_elsewhere(
    tmp_path: Path, file: str, content: dict[str, Any], expected: tuple[str, str, int]
) -> None:
    content = {key: value for key, value in content.items() if value is not None}
    if file.endswith(".json"):
        (tmp_path / file).write_text(json.dumps(content))
    config = {**PUBLISHED[R1][0], **({} if file.endswith(".json") else {file: content})}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = read_spec(tmp_path).stored_format
    assert stored is not None
    assert (stored.method, stored.packing, stored.group_size) == expected
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": AWQ}))
    assert read_spec(tmp_path).stored_format.packing == "awq"  # what config.json says of today counts
