"""config.json's quantization_config of compressed-tensors checkpoints -> StoredFormat.

Linear layers that one method holds must be of one group: its weights and its activations decide the method.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.module_lists import HEAD, entries_of, groups_of, modules_meant
from slipstream.nn.stored_format import StoredFormat

BLOCK_SIZE = [128, 128]
PACKING = "compressed-tensors"
FLOAT_FORMATS = ("float-quantized", "naive-quantized")
INT_FORMATS, PACKED_FORMATS = ("int-quantized",), ("pack-quantized",)
MIXED = "mixed-precision"  # each group has a format of its own
FORMATS = (*FLOAT_FORMATS, *INT_FORMATS, *PACKED_FORMATS, MIXED)


def read_compressed_tensors(section: HFConfig, modules: Sequence[str]) -> StoredFormat:
    """The format of these modules. Raises ConfigError for formats, strategies and combinations that are not served."""
    section.choice("format", FORMATS)
    if section.section("transform_config") is not None:
        raise section.error("transform_config", "rotations (QuIP, SpinQuant) are not served; accepted: absent or empty")
    sparsity = section.section("sparsity_config")
    if sparsity is not None:
        sparsity.choice("format", ("dense",), "dense")
    group, weights, head = _group(section, modules)
    if group.section("output_activations") is not None:
        raise group.error("output_activations", "outputs are not quantised when served; accepted: absent or null")
    stored = group if group.has("format") else section
    inputs = group.section("input_activations")
    kinds = tuple("none" if part is None else _kind(part) for part in (weights, inputs))
    if kinds == ("float 8", "float 8"):
        assert inputs is not None
        return _read_float8(stored, weights, inputs, head)
    if kinds in (("int 8", "none"), ("int 8", "int 8")):
        return _read_int8(stored, weights, inputs, head)
    if kinds in (("int 4", "none"), ("int 4", "float 8")):
        return _read_int4(stored, weights, inputs, head)
    served = "float 8 with float 8; int 8 alone or with int 8; int 4 alone or with float 8"
    raise weights.error("num_bits", f"{kinds[0]} with activations {kinds[1]} is not served; served are {served}")


def _group(section: HFConfig, modules: Sequence[str]) -> tuple[HFConfig, HFConfig, bool]:
    """(group of these modules, its weights, whether lm_head is of it too)."""
    groups = section.section("config_groups")
    names = [] if groups is None else list(dict.fromkeys(groups_of(groups, modules)))
    group = None if groups is None or len(names) != 1 or not names[0] else groups.section(names[0])
    weights = None if group is None else group.section("weights")
    if groups is None or group is None or weights is None:
        what = f"{modules[0]} and its like"
        raise section.error("config_groups", f"must have one group with weights for {what}, as for Linear")
    ignored = modules_meant(section, "ignore", entries_of(section, "ignore"), [HEAD])
    return group, weights, not ignored and groups_of(groups, [HEAD]) == names


def _kind(part: HFConfig) -> str:
    return f"{part.choice('type', ('float', 'int'), 'int')} {part.integer('num_bits')}"


def _require_symmetric(*parts: HFConfig | None) -> None:
    for part in parts:
        if part is not None and not part.boolean("symmetric", True):
            raise part.error("symmetric", "must be true; zero-points are served in 4-bit weights only")


def _read_float8(section: HFConfig, weights: HFConfig, inputs: HFConfig, head: bool) -> StoredFormat:
    section.choice("format", FLOAT_FORMATS)
    _require_symmetric(weights, inputs)
    scales = weights.choice("strategy", ("tensor", "channel", "block"))
    if scales == "block":
        if weights.values.get("block_structure") != BLOCK_SIZE or inputs.integer("group_size", 0, 0) != BLOCK_SIZE[1]:
            raise weights.error("block_structure", f"must be {BLOCK_SIZE}, with input groups of {BLOCK_SIZE[1]}")
        return StoredFormat("block_wise_fp8", "block", quantized_head=head)
    return StoredFormat("fp8", scales, static_inputs=_is_static(inputs), quantized_head=head)


def _read_int8(section: HFConfig, weights: HFConfig, inputs: HFConfig | None, head: bool) -> StoredFormat:
    _require_symmetric(weights, inputs)
    scales = weights.choice("strategy", ("tensor", "channel"))
    if inputs is None:
        section.choice("format", PACKED_FORMATS)
        return StoredFormat("wint8", scales, quantized_head=head, packing=PACKING)
    section.choice("format", INT_FORMATS)
    return StoredFormat("w8a8_int8", scales, static_inputs=_is_static(inputs), quantized_head=head)


def _read_int4(section: HFConfig, weights: HFConfig, inputs: HFConfig | None, head: bool) -> StoredFormat:
    stored = section.choice("format", PACKED_FORMATS if inputs is None else (*PACKED_FORMATS, *INT_FORMATS))
    if inputs is not None and _is_static(inputs):
        raise inputs.error("dynamic", "must be true: activations beside 4-bit weights are scaled per token")
    if stored in INT_FORMATS:
        _require_symmetric(weights)
    scales = weights.choice("strategy", ("group", "channel"))
    act_order = weights.choice("actorder", ("group", "weight", "static", "dynamic", ""), "")
    return StoredFormat(
        "wint4" if inputs is None else "w4a8_fp8",
        "group",
        quantized_head=head,
        packing=PACKING if stored in PACKED_FORMATS else "bytes",
        group_size=weights.integer("group_size") if scales == "group" else 0,
        has_zeros=not weights.boolean("symmetric", True),
        act_order=act_order in ("group", "dynamic"),  # of "weight", only the order of quantising was another
    )


def _is_static(inputs: HFConfig) -> bool:
    is_static = not inputs.boolean("dynamic", False)
    inputs.choice("strategy", ("tensor",) if is_static else ("token",))
    return is_static
