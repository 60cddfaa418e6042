"""config.json's quantization_config -> StoredFormat: fp8, FBGEMM, compressed-tensors, ModelOpt, AWQ, GPTQ checkpoints.

Whatever the served layers could not honour is refused here, by name, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from slipstream.nn.hf_config import QUANTIZATION, HFConfig
from slipstream.nn.models.compressed_tensors import BLOCK_SIZE, read_compressed_tensors
from slipstream.nn.models.module_lists import (
    PATTERN,
    check_patterns,
    entries_of,
    entries_of_transformers,
    groups_of,
    modules_meant,
)
from slipstream.nn.quant.method import CONFIG_READERS
from slipstream.nn.stored_format import StoredFormat

CHANNEL = -1  # as group_size: one group a row
WEIGHT_SCALE, INPUT_SCALE = "weight_scale_inv", "activation_scale"  # as transformers calls them
LEFT_OUT = "-:"  # before a pattern, in GPTQModel's rules
RULES = "dynamic"  # which hold them
LISTS = {  # of modules that are left unquantised
    "awq": ("modules_to_not_convert",),
    "fp8": ("modules_to_not_convert", "ignored_layers"),
    "compressed-tensors": ("ignore",),
    "modelopt": ("ignore", "exclude_modules"),
    "fbgemm_fp8": ("modules_to_not_convert",),
}
READ_BY_TRANSFORMERS = ("awq", "fp8", "fbgemm_fp8")  # whose lists these are


def read_stored_format(config: HFConfig, modules: Sequence[str]) -> StoredFormat | None:
    """How the checkpoint stores those of these linear layers that it quantises, which one method holds; None: none.

    Raises ConfigError for formats that are not served, and where some of them are quantised otherwise than others.
    """
    section = config.section(QUANTIZATION)
    if section is None:
        return None
    readers = {
        "awq": _read_awq,
        "gptq": _read_gptq,
        "fp8": _read_fp8,
        "compressed-tensors": _read_compressed_tensors,
        "modelopt": _read_modelopt,
        "fbgemm_fp8": _read_fbgemm,
        **CONFIG_READERS,
    }
    read = readers[section.choice("quant_method", tuple(readers))]
    left_out = modules_left_out(section, modules)
    return read(section, [module for module in modules if module not in left_out])


def modules_left_out(section: HFConfig, modules: Collection[str]) -> dict[str, str]:
    """Which of these linear layers a quantization_config leaves unquantised, and by which of its fields."""
    method = section.string("quant_method")
    if method == "gptq":
        lists = {RULES: _left_out_by_rules(section)}
    else:
        read = entries_of_transformers if method in READ_BY_TRANSFORMERS else entries_of
        lists = {key: read(section, key) for key in LISTS.get(method, ())}
    found: dict[str, str] = {}
    for key, entries in lists.items():
        found |= dict.fromkeys(modules_meant(section, key, entries, modules), key)
    groups = section.section("config_groups") if method == "compressed-tensors" else None
    if groups is not None:
        rest = [module for module in modules if module not in found]
        found |= {module: "config_groups" for module, name in zip(rest, groups_of(groups, rest)) if not name}
    return found


def _read_awq(section: HFConfig, modules: Sequence[str]) -> StoredFormat | None:
    section = section.with_defaults(bits=section.values.get("w_bit"), group_size=section.values.get("q_group_size"))
    _require_four_bits(section)
    version = section.string("version", "gemm")
    if version.lower() != "gemm":
        raise section.error("version", "not supported; accepted: gemm")
    if not section.boolean("zero_point", True):
        raise section.error("zero_point", "must be true")
    if not modules:
        return None
    return StoredFormat("wint4", "group", packing="awq", group_size=_group_size(section), has_zeros=True)


def _read_gptq(section: HFConfig, modules: Sequence[str]) -> StoredFormat | None:
    _require_four_bits(section)
    if section.boolean("is_marlin_format", False):
        raise section.error("is_marlin_format", "weights are packed for another engine's kernel; store them as gptq")
    if not modules:
        return None
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


def _left_out_by_rules(section: HFConfig) -> tuple[str, ...]:
    """Patterns of GPTQModel's rules "-:pattern", which leave modules out. Raises ConfigError for other rules."""
    rules = section.values.get(RULES) or {}
    if not isinstance(rules, dict) or not all(rule.startswith(LEFT_OUT) for rule in rules):
        reason = f"gives modules formats of their own; accepted: rules {LEFT_OUT}pattern, of modules left unquantised"
        raise section.error(RULES, reason)
    patterns = tuple(f"{PATTERN}{rule.removeprefix(LEFT_OUT)}" for rule in rules)
    check_patterns(section, RULES, patterns)
    return patterns


def _require_four_bits(section: HFConfig) -> None:
    if section.integer("bits") != 4:
        raise section.error("bits", "must be 4")


def _group_size(section: HFConfig) -> int:
    size = section.integer("group_size", minimum=CHANNEL)
    if size == 0:
        raise section.error("group_size", f"must be {CHANNEL} or a positive number")
    return 0 if size == CHANNEL else size


def _read_fp8(section: HFConfig, modules: Sequence[str]) -> StoredFormat | None:
    """Transformers' own format: DeepSeek's blocks if weight_block_size is there, else one scale per tensor.

    A weight_block_size of null is that of transformers (Ministral 3), whose names of both scales are not AutoFP8's.
    """
    section.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    is_static = section.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    if not modules:
        return None
    if not section.has("weight_block_size"):
        stored = StoredFormat("fp8", "tensor", static_inputs=is_static)
        is_transformers = "weight_block_size" in section.values
        return replace(stored, scale_name=WEIGHT_SCALE, input_scale_name=INPUT_SCALE) if is_transformers else stored
    if section.values["weight_block_size"] != BLOCK_SIZE or is_static:
        raise section.error("weight_block_size", f"must be {BLOCK_SIZE}, with activation_scheme dynamic")
    return StoredFormat("block_wise_fp8", "block", WEIGHT_SCALE)


def _read_compressed_tensors(section: HFConfig, modules: Sequence[str]) -> StoredFormat | None:
    is_of_cache_alone = section.section("config_groups") is None and section.has("kv_cache_scheme")
    return None if is_of_cache_alone or not modules else read_compressed_tensors(section, modules)


def _read_modelopt(section: HFConfig, modules: Sequence[str]) -> StoredFormat | None:
    if section.has("kv_cache_quant_algo") and not section.has("quant_algo"):
        return None
    section.choice("quant_algo", ("FP8",))
    return StoredFormat("fp8", "tensor", static_inputs=True) if modules else None


def _read_fbgemm(section: HFConfig, modules: Sequence[str]) -> StoredFormat | None:
    """Meta's own format of Llama 3.1 405B. activation_scale_ub bounds an activation's scale, beyond which FBGEMM clips;
    ours is the token's largest value, which clips nothing."""
    return StoredFormat("fp8", "channel") if modules else None
