"""Seed-OSS: Llama with heads of 128, and biases of queries, keys and values; other biases are optional."""

from __future__ import annotations

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.common import base_spec, with_biases
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.spec import DecoderSpec

HEAD_DIM = 128  # where a config does not state it


def read_spec(config: HFConfig) -> DecoderSpec:
    qkv_bias, o_bias = config.boolean("attention_bias", True), config.boolean("attention_out_bias", False)
    mlp_bias = config.boolean("mlp_bias", False)
    return with_biases(base_spec(config.with_unstated(head_dim=HEAD_DIM)), qkv_bias, o_bias, mlp_bias)


FAMILIES.register("SeedOssForCausalLM")(Family(read_spec, LLAMA_NAMES))
