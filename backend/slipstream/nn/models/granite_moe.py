"""Granite 3 with experts, perhaps beside an MLP that all tokens take; and Granite 4 without Mamba layers.

Experts are stored in one tensor a layer, gate and up of the shared MLP in another.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import AttentionSpec, DenseSpec, ExpertsSpec, RouterSpec
from slipstream.nn.models.common import activation_of, base_spec
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.models.granite import with_multipliers
from slipstream.nn.models.mixture import SHARED, with_experts
from slipstream.nn.models.module_lists import ATTENTION_PARTS, MLP_PARTS
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_names import Fused, Names, Stacked

EXPERTS, MLP = "model.layers.{layer}.block_sparse_moe", "model.layers.{layer}.shared_mlp"
GATE_UP = Stacked(f"{EXPERTS}.input_linear", ("gate", "up"), is_module=True)
SHARED_PARTS = tuple(f"{SHARED}{part}" for part in MLP_PARTS)
SHARED_GATE_UP = Fused(f"{MLP}.input_linear", SHARED_PARTS[:2])
NAMES: Names = {
    **LLAMA_NAMES,
    "router": f"{EXPERTS}.router.layer",
    "expert_gate": GATE_UP,
    "expert_up": GATE_UP,
    "expert_down": Stacked(f"{EXPERTS}.output_linear", ("down",), is_module=True),
    **dict.fromkeys(SHARED_PARTS[:2], SHARED_GATE_UP),
    SHARED_PARTS[2]: f"{MLP}.output_linear",
}
ATTENTION = ("attention", "full_attention")  # of layer_types; other layers have a state
NO_POSITIONS = "nope"  # as position_embedding_type; null means the same
NUM_EXPERTS = 8  # where a config does not state it


def read_spec(config: HFConfig) -> DecoderSpec:
    return _with_experts(config, _base(config, ATTENTION_PARTS), None)


def read_shared(config: HFConfig) -> DecoderSpec:
    return _with_experts(config, _base(config, ATTENTION_PARTS), _shared(config, default=0))


def read_hybrid(config: HFConfig) -> DecoderSpec:
    kinds, num_layers = config.strings("layer_types"), config.integer("num_hidden_layers")
    if len(kinds) != num_layers or set(kinds) - set(ATTENTION):
        raise config.error(
            "layer_types", f"must be {num_layers} of {' or '.join(ATTENTION)}: no other layers are served"
        )
    shared = _shared(config, default=1024)
    if config.integer("num_local_experts", NUM_EXPERTS, minimum=0):
        spec = _with_experts(config, _base(config, ATTENTION_PARTS), shared)
    elif shared is None:
        raise config.error("shared_intermediate_size", "must be at least 1 in a model without experts")
    else:
        spec = _base(config, (*ATTENTION_PARTS, *SHARED_PARTS))
        spec = spec.map_layers(lambda _, layer: replace(layer, mlp=shared))
    if config.choice("position_embedding_type", ("rope", NO_POSITIONS), NO_POSITIONS) == "rope":
        return spec
    return spec.map_attention(lambda own: replace(own, rope=None))


def _base(config: HFConfig, linear_parts: tuple[str, ...]) -> DecoderSpec:
    bias = config.boolean("attention_bias", False)

    def change(attention: AttentionSpec) -> AttentionSpec:
        return replace(attention, qkv_bias=bias, o_bias=bias)

    return with_multipliers(config, base_spec(config, linear_parts, NAMES).map_attention(change))


def _shared(config: HFConfig, default: int) -> DenseSpec | None:
    size = config.integer("shared_intermediate_size", default, minimum=0)
    return DenseSpec(config.integer("hidden_size"), size, activation_of(config), prefix=SHARED) if size else None


def _with_experts(config: HFConfig, spec: DecoderSpec, shared: DenseSpec | None) -> DecoderSpec:
    routing = RouterSpec(config.integer("num_experts_per_tok", 2))
    size, num_experts = config.integer("intermediate_size"), config.integer("num_local_experts", NUM_EXPERTS)
    return with_experts(config, spec, NAMES, ExpertsSpec(spec.hidden_size, size, num_experts, routing, shared))


FAMILIES.register("GraniteMoeForCausalLM")(Family(read_spec, NAMES))
FAMILIES.register("GraniteMoeSharedForCausalLM")(Family(read_shared, NAMES))
FAMILIES.register("GraniteMoeHybridForCausalLM")(Family(read_hybrid, NAMES))
