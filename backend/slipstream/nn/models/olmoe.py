"""OLMoE: OLMo 2's norms over all heads at once, but Llama's places of norms, and experts in every layer.

Source: arXiv:2409.02060.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream_kernels.ops import RoutingRule

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import ExpertsSpec, RouterSpec
from slipstream.nn.models.common import base_spec
from slipstream.nn.models.family import FAMILIES, Family
from slipstream.nn.models.mixture import expert_names, with_experts
from slipstream.nn.models.module_lists import ATTENTION_PARTS
from slipstream.nn.spec import DecoderSpec

NAMES = expert_names("model.layers.{layer}.mlp")


def read_spec(config: HFConfig) -> DecoderSpec:
    if config.has("clip_qkv"):
        raise config.error("clip_qkv", "must be null: queries, keys and values are served unclipped only")
    bias = config.boolean("attention_bias", False)
    spec = base_spec(config.with_defaults(rms_norm_eps=1e-5), ATTENTION_PARTS)
    spec = spec.map_attention(lambda own: replace(own, qk_norm="flat", qkv_bias=bias, o_bias=bias))
    rule = RoutingRule(renormalises=config.boolean("norm_topk_prob", False))
    routing = RouterSpec(config.integer("num_experts_per_tok", 8), rule)
    size, num_experts = config.integer("intermediate_size"), config.integer("num_experts", 64)
    return with_experts(config, spec, NAMES, ExpertsSpec(spec.hidden_size, size, num_experts, routing))


FAMILIES.register("OlmoeForCausalLM")(Family(read_spec, NAMES))
