"""Granite 3: Llama whose embeddings, scores, residual stream and logits are multiplied by numbers of its config."""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import LayerSpec
from slipstream.nn.models import llama
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.spec import DecoderSpec


def read_spec(config: HFConfig) -> DecoderSpec:
    return with_multipliers(config, llama.read_spec(config))


def with_multipliers(config: HFConfig, spec: DecoderSpec) -> DecoderSpec:
    scale, residual = config.number("attention_multiplier", 1.0), config.number("residual_multiplier", 1.0)

    def change(_: int, layer: LayerSpec) -> LayerSpec:
        return replace(layer, attention=replace(layer.attention, scale=scale), residual_scale=residual)

    return replace(
        spec.map_layers(change),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )


FAMILIES.register("GraniteForCausalLM")(Family(read_spec, LLAMA_NAMES))
