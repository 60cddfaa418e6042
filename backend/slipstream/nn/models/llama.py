"""Llama 2, 3 and 3.x: biases are optional; everything else is the base."""

from __future__ import annotations

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.common import base_spec, with_biases
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.spec import DecoderSpec


def read_spec(config: HFConfig) -> DecoderSpec:
    bias = config.boolean("attention_bias", False)
    mlp_bias = config.boolean("mlp_bias", False)
    return with_biases(base_spec(config), bias, bias, mlp_bias)


FAMILIES.register("LlamaForCausalLM")(Family(read_spec, LLAMA_NAMES))
