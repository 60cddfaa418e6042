"""HyperCLOVA X: Granite's multipliers, that of the logits as a factor, and perhaps norms on both sides."""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models import granite
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.spec import DecoderSpec

NAMES = {
    **LLAMA_NAMES,
    "attention_output_norm": "model.layers.{layer}.post_norm1",
    "mlp_output_norm": "model.layers.{layer}.post_norm2",
}


def read_spec(config: HFConfig) -> DecoderSpec:
    norms = "both" if config.boolean("use_post_norm", True) else "pre"
    spec = granite.read_spec(config).map_layers(lambda _, layer: replace(layer, norms=norms))
    if not config.has("attention_multiplier"):
        spec = spec.map_attention(lambda own: replace(own, scale=None))
    return replace(spec, logit_scale=config.number("logits_scaling", 1.0))


FAMILIES.register("HyperCLOVAXForCausalLM")(Family(read_spec, NAMES))
