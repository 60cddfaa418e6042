"""Qwen3: an RMSNorm on every query and key head before the rotation; heads of 128 whatever the hidden size."""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.common import base_spec, sliding_windows, with_windows
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.spec import DecoderSpec


def read_spec(config: HFConfig) -> DecoderSpec:
    config.integer("head_dim")  # not derived from the hidden size in this family
    bias = config.boolean("attention_bias", False)
    spec = base_spec(config).map_attention(lambda own: replace(own, qk_norm="head", qkv_bias=bias, o_bias=bias))
    return with_windows(spec, sliding_windows(config, spec.num_layers))


FAMILIES.register("Qwen3ForCausalLM")(Family(read_spec, LLAMA_NAMES))
