"""config.json's quantization_config -> StoredFormat: Hugging Face "fp8", compressed-tensors and ModelOpt checkpoints.

Whatever the served layers could not honour is refused here, by name, before any weight is read.
"""

from __future__ import annotations

import re

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.family import LLAMA_NAMES
from slipstream.nn.stored_format import StoredFormat

BLOCK_SIZE = [128, 128]
LINEAR_PARTS = ("q", "k", "v", "o", "gate", "up", "down")
HEAD = LLAMA_NAMES["lm_head"]


def read_stored_format(config: HFConfig, num_layers: int) -> StoredFormat | None:
    """None for an unquantised checkpoint. Raises ConfigError for formats and exceptions that are not served."""
    section = config.section("quantization_config")
    if section is None:
        return None
    readers = {"fp8": _read_fp8, "compressed-tensors": _read_compressed_tensors, "modelopt": _read_modelopt}
    return readers[section.choice("quant_method", tuple(readers))](section, num_layers)


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
    section.choice("format", ("float-quantized", "naive-quantized"))
    _refuse_exceptions(section, "ignore", num_layers)
    groups = section.section("config_groups")
    names = [] if groups is None else list(groups.values)
    group = None if groups is None or len(names) != 1 else groups.section(names[0])
    weights = None if group is None else group.section("weights")
    inputs = None if group is None else group.section("input_activations")
    if group is None or weights is None or inputs is None or group.strings("targets") != ["Linear"]:
        raise section.error("config_groups", "must be one group of weights and input_activations for Linear")
    for part in (weights, inputs):
        if part.integer("num_bits") != 8 or part.string("type") != "float" or not part.boolean("symmetric", True):
            raise part.error("num_bits", "must be 8 bits of type float, symmetric")
    scales = weights.choice("strategy", ("tensor", "channel", "block"))
    head = not any(_matches(entry, HEAD) for entry in section.strings("ignore"))
    if scales == "block":
        if weights.values.get("block_structure") != BLOCK_SIZE or inputs.integer("group_size", 0, 0) != BLOCK_SIZE[1]:
            raise weights.error("block_structure", f"must be {BLOCK_SIZE}, with input groups of {BLOCK_SIZE[1]}")
        return StoredFormat("block_wise_fp8", "block", quantized_head=head)
    is_static = not inputs.boolean("dynamic", False)
    inputs.choice("strategy", ("tensor",) if is_static else ("token",))
    return StoredFormat("fp8", scales, static_inputs=is_static, quantized_head=head)


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
