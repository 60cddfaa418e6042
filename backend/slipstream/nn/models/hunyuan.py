"""Hunyuan V1, dense and with experts: Llama with norms of query and key heads behind their rotation.

Experts stand beside a shared MLP of one's size. Long contexts raise the rope's theta by a power of `alpha`.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import AttentionSpec, DenseSpec, ExpertsSpec, RouterSpec
from slipstream.nn.models.common import base_spec
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.models.mixture import SHARED, expert_names, with_experts
from slipstream.nn.models.module_lists import ATTENTION_PARTS, MLP_PARTS
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_names import Names

ATTENTION, MLP = "model.layers.{layer}.self_attn", "model.layers.{layer}.mlp"
NORMS = {"q_norm": f"{ATTENTION}.query_layernorm", "k_norm": f"{ATTENTION}.key_layernorm"}
NAMES: Names = {**LLAMA_NAMES, **NORMS}
MOE_NAMES: Names = {**expert_names(MLP, shared="shared_mlp"), **NORMS, "router": f"{MLP}.gate.wg"}


def read_dense(config: HFConfig) -> DecoderSpec:
    return _base(config, (*ATTENTION_PARTS, *MLP_PARTS), NAMES)


def read_moe(config: HFConfig) -> DecoderSpec:
    config = config.renamed(num_experts_per_tok="moe_topk")
    for key in ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"):
        config = _with_one_value(config, key)
    spec = _base(config, ATTENTION_PARTS, MOE_NAMES)
    size = config.integer("intermediate_size")
    if config.integer("moe_intermediate_size", size) != size:
        raise config.error("moe_intermediate_size", f"must be intermediate_size={size}")
    if config.integer("num_shared_expert", 1) != 1:
        raise config.error("num_shared_expert", "must be 1")
    shared = DenseSpec(spec.hidden_size, size, prefix=SHARED)
    routing = RouterSpec(config.integer("num_experts_per_tok", 1))
    experts = ExpertsSpec(spec.hidden_size, size, config.integer("num_experts", 1), routing, shared)
    return with_experts(config, spec, MOE_NAMES, experts)


def _base(config: HFConfig, linear_parts: tuple[str, ...], names: Names) -> DecoderSpec:
    bias = config.boolean("attention_bias", False)

    def change(attention: AttentionSpec) -> AttentionSpec:
        return replace(attention, qk_norm="rotated", qkv_bias=bias, o_bias=bias)

    config = _with_raised_theta(config.with_defaults(rms_norm_eps=1e-5))
    return base_spec(config, linear_parts, names).map_attention(change)


def _with_raised_theta(config: HFConfig) -> HFConfig:
    """A "dynamic" rope with `alpha` is one of a fixed larger theta, whatever the length of a sequence."""
    section = config.section("rope_scaling") or config.section("rope_parameters")
    kinds = () if section is None else (section.values.get("rope_type"), section.values.get("type"))
    if section is None or "dynamic" not in kinds or not section.has("alpha"):
        return config
    num_heads, theta = config.integer("num_attention_heads"), config.number("rope_theta", 10_000.0)
    head_dim = config.integer("head_dim", config.integer("hidden_size") // num_heads, minimum=4)
    raised = section.number("rope_theta", theta) * section.number("alpha") ** (head_dim / (head_dim - 2))
    return config.with_values(rope_scaling=None, rope_parameters={"rope_type": "default", "rope_theta": raised})


def _with_one_value(config: HFConfig, key: str) -> HFConfig:
    """The config with one number for all layers, where it has a list of one for each."""
    values = config.values.get(key)
    if not isinstance(values, list):
        return config
    if len(set(config.integers(key))) != 1:
        raise config.error(key, "must be the same in all layers")
    return config.with_values(**{key: values[0]})


FAMILIES.register("HunYuanDenseV1ForCausalLM")(Family(read_dense, NAMES))
FAMILIES.register("HunYuanMoEV1ForCausalLM")(Family(read_moe, MOE_NAMES))
