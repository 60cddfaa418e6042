"""GLM-4 of 2025-04 (9B and 32B, also GLM-Z1): GLM with norms before and after attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models import glm
from slipstream.nn.models.family import FAMILIES, Family
from slipstream.nn.spec import DecoderSpec

NAMES = {
    **glm.NAMES,
    "attention_output_norm": "model.layers.{layer}.post_self_attn_layernorm",
    "mlp_output_norm": "model.layers.{layer}.post_mlp_layernorm",
}


def read_spec(config: HFConfig) -> DecoderSpec:
    spec = glm.read_spec(config)
    return spec.map_layers(lambda _, layer: replace(layer, norms="both"))


FAMILIES.register("Glm4ForCausalLM")(Family(read_spec, NAMES))
