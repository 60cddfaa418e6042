"""Llama 2, 3 and 3.x: biases are optional; everything else is the base."""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.common import base_spec
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.spec import DecoderSpec


def read_spec(config: HFConfig) -> DecoderSpec:
    attention_bias = config.boolean("attention_bias", False)
    mlp_bias = config.boolean("mlp_bias", False)
    return replace(base_spec(config), qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=mlp_bias)


FAMILIES.register("LlamaForCausalLM")(Family(read_spec, LLAMA_NAMES))
