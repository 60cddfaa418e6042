"""Seed-OSS: Llama with heads of 128, and biases of queries, keys and values; other biases are optional."""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import DenseSpec, LayerSpec
from slipstream.nn.models.common import base_spec
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.spec import DecoderSpec

HEAD_DIM = 128  # where a config does not state it


def read_spec(config: HFConfig) -> DecoderSpec:
    qkv_bias, o_bias = config.boolean("attention_bias", True), config.boolean("attention_out_bias", False)
    mlp_bias = config.boolean("mlp_bias", False)

    def with_biases(_: int, layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mlp, DenseSpec)
        attention = replace(layer.attention, qkv_bias=qkv_bias, o_bias=o_bias)
        return replace(layer, attention=attention, mlp=replace(layer.mlp, bias=mlp_bias))

    return base_spec(config.with_unstated(head_dim=HEAD_DIM)).map_layers(with_biases)


FAMILIES.register("SeedOssForCausalLM")(Family(read_spec, LLAMA_NAMES))
