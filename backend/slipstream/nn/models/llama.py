"""Llama 2, 3 and 3.x: biases are optional; everything else is the base."""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import DenseSpec, LayerSpec
from slipstream.nn.models.common import base_spec
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.spec import DecoderSpec


def read_spec(config: HFConfig) -> DecoderSpec:
    bias = config.boolean("attention_bias", False)
    mlp_bias = config.boolean("mlp_bias", False)

    def with_biases(_: int, layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mlp, DenseSpec)
        attention = replace(layer.attention, qkv_bias=bias, o_bias=bias)
        return replace(layer, attention=attention, mlp=replace(layer.mlp, bias=mlp_bias))

    return base_spec(config).map_layers(with_biases)


FAMILIES.register("LlamaForCausalLM")(Family(read_spec, LLAMA_NAMES))
