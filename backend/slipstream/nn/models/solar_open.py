"""Solar Open: GLM-4.5's experts in every layer, with whole heads rotated."""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.common import base_spec
from slipstream.nn.models.family import FAMILIES, Family
from slipstream.nn.models.glm4_moe import NAMES, read_experts
from slipstream.nn.models.mixture import with_experts
from slipstream.nn.models.module_lists import ATTENTION_PARTS
from slipstream.nn.spec import DecoderSpec

HEAD_DIM, THETA = 128, 1_000_000.0  # where a config does not state them


def read_spec(config: HFConfig) -> DecoderSpec:
    if config.boolean("use_qk_norm", False):
        raise config.error("use_qk_norm", "must be false in this architecture")
    if config.integer("first_k_dense_replace", 0, minimum=0):
        raise config.error("first_k_dense_replace", "must be 0: every layer has experts")
    bias = config.boolean("attention_bias", False)
    config = config.with_defaults(rms_norm_eps=1e-5, rope_theta=THETA).with_unstated(head_dim=HEAD_DIM)
    experts = read_experts(config, config.integer("hidden_size"))
    spec = base_spec(config.with_values(intermediate_size=experts.intermediate_size), ATTENTION_PARTS)
    spec = spec.map_attention(lambda own: replace(own, qkv_bias=bias))
    return with_experts(config, spec, NAMES, experts)


FAMILIES.register("SolarOpenForCausalLM")(Family(read_spec, NAMES))
