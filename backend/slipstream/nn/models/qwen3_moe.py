"""Qwen3-MoE: Qwen3's attention over many small experts, with none that all tokens share."""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.common import WINDOW, base_spec
from slipstream.nn.models.family import FAMILIES, Family
from slipstream.nn.models.mistral import with_one_window
from slipstream.nn.models.mixture import expert_names, with_experts
from slipstream.nn.models.module_lists import ATTENTION_PARTS
from slipstream.nn.models.qwen2_moe import dense_layers, read_experts
from slipstream.nn.spec import DecoderSpec

NAMES = expert_names("model.layers.{layer}.mlp")


def read_spec(config: HFConfig) -> DecoderSpec:
    config.integer("head_dim")  # not derived from the hidden size in this family
    bias = config.boolean("attention_bias", False)
    spec = base_spec(config, ATTENTION_PARTS)
    spec = spec.map_attention(lambda own: replace(own, qk_norm="head", qkv_bias=bias, o_bias=bias))
    experts = read_experts(config, spec.hidden_size)
    spec = with_experts(config, spec, NAMES, experts, dense_layers(config, spec.num_layers))
    windowed = config.with_unstated(sliding_window=WINDOW)
    return with_one_window(windowed, spec) if config.boolean("use_sliding_window", False) else spec


FAMILIES.register("Qwen3MoeForCausalLM")(Family(read_spec, NAMES))
