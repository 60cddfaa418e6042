"""config.json's quantization_config -> StoredFormat: fp8, compressed-tensors, ModelOpt, AWQ and GPTQ checkpoints.

Whatever the served layers could not honour is refused here, by name, before any weight is read.
"""

from __future__ import annotations

import re

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.compressed_tensors import BLOCK_SIZE, read_compressed_tensors
from slipstream.nn.models.family import LLAMA_NAMES
from slipstream.nn.stored_format import StoredFormat

LINEAR_PARTS = ("q", "k", "v", "o", "gate", "up", "down")
HEAD = LLAMA_NAMES["lm_head"]
CHANNEL = -1  # as group_size: one group a row


def read_stored_format(config: HFConfig, num_layers: int) -> StoredFormat | None:
    """None for an unquantised checkpoint. Raises ConfigError for formats and exceptions that are not served."""
    section = config.section("quantization_config")
    if section is None:
        return None
    readers = {
        "awq": _read_awq,
        "gptq": _read_gptq,
        "fp8": _read_fp8,
        "compressed-tensors": _read_compressed_tensors,
        "modelopt": _read_modelopt,
    }
    return readers[section.choice("quant_method", tuple(readers))](section, num_layers)


def _read_awq(section: HFConfig, num_layers: int) -> StoredFormat:
    _require_four_bits(section)
    version = section.string("version", "gemm")
    if version.lower() != "gemm":
        raise section.error("version", "not supported; accepted: gemm")
    if not section.boolean("zero_point", True):
        raise section.error("zero_point", "must be true")
    _refuse_exceptions(section, "modules_to_not_convert", num_layers)
    return StoredFormat("wint4", "group", packing="awq", group_size=_group_size(section), has_zeros=True)


def _read_gptq(section: HFConfig, num_layers: int) -> StoredFormat:
    _require_four_bits(section)
    if section.has("dynamic") and section.values["dynamic"]:
        raise section.error("dynamic", "gives modules formats of their own; served are checkpoints of one")
    if section.boolean("is_marlin_format", False):
        raise section.error("is_marlin_format", "weights are packed for another engine's kernel; store them as gptq")
    key = "checkpoint_format" if section.has("checkpoint_format") else "format"
    return StoredFormat(
        "wint4",
        "group",
        quantized_head=section.boolean("lm_head", False),
        packing=section.choice(key, ("gptq", "gptq_v2"), "gptq"),
        group_size=_group_size(section),
        has_zeros=not section.boolean("sym"),
        act_order=section.boolean("desc_act", False),
    )


def _require_four_bits(section: HFConfig) -> None:
    if section.integer("bits") != 4:
        raise section.error("bits", "must be 4")


def _group_size(section: HFConfig) -> int:
    size = section.integer("group_size", minimum=CHANNEL)
    if size == 0:
        raise section.error("group_size", f"must be {CHANNEL} or a positive number")
    return 0 if size == CHANNEL else size


def _read_fp8(section: HFConfig, num_layers: int) -> StoredFormat:
    """Transformers' own format: DeepSeek's blocks if weight_block_size is there, else one scale per tensor."""
    section.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    is_static = section.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    for key in ("modules_to_not_convert", "ignored_layers"):
        _refuse_exceptions(section, key, num_layers)
    if not section.has("weight_block_size"):
        return StoredFormat("fp8", "tensor", static_inputs=is_static)
    if section.values["weight_block_size"] != BLOCK_SIZE or is_static:
        raise section.error("weight_block_size", f"must be {BLOCK_SIZE}, with activation_scheme dynamic")
    return StoredFormat("block_wise_fp8", "block", "weight_scale_inv")


def _read_compressed_tensors(section: HFConfig, num_layers: int) -> StoredFormat:
    _refuse_exceptions(section, "ignore", num_layers)
    return read_compressed_tensors(section, not any(_matches(entry, HEAD) for entry in section.strings("ignore")))


def _read_modelopt(section: HFConfig, num_layers: int) -> StoredFormat:
    section.choice("quant_algo", ("FP8",))
    for key in ("ignore", "exclude_modules"):
        _refuse_exceptions(section, key, num_layers)
    return StoredFormat("fp8", "tensor", static_inputs=True)


def _refuse_exceptions(section: HFConfig, key: str, num_layers: int) -> None:
    """All linears of all layers share one method: only modules that are none of them may be left unquantised."""
    names = [LLAMA_NAMES[part].format(layer=layer) for layer in range(num_layers) for part in LINEAR_PARTS]
    for entry in section.strings(key):
        excluded = [name for name in names if _matches(entry, name)]
        if excluded:
            raise section.error(key, f"leaves {excluded[0]} unquantised; served are checkpoints without such layers")


def _matches(entry: str, name: str) -> bool:
    """Whether an entry of a list of modules means `name`: "re:" and a pattern, a whole name, or components of one."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    if "*" in entry:
        return re.fullmatch(re.escape(entry).replace(r"\*", ".*"), name) is not None
    return f".{entry}." in f".{name}."
