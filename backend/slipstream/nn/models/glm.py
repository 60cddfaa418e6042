"""GLM-4-9B in transformers' layout: half of a head is rotated, in neighbouring pairs; gate and up are stored as one."""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.common import base_spec
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_names import Fused, Names

ROTATED_PART, NORM_EPS = 0.5, 1.5625e-7
GATE_UP = Fused("model.layers.{layer}.mlp.gate_up_proj", ("gate", "up"))
NAMES = {**LLAMA_NAMES, "gate": GATE_UP, "up": GATE_UP}


def read_spec(config: HFConfig, names: Names = NAMES, norm_eps: float = NORM_EPS) -> DecoderSpec:
    """norm_eps: where the config does not say."""
    bias = config.boolean("attention_bias", True)
    spec = base_spec(config, names=names, rotated_part=ROTATED_PART, is_interleaved=True)
    spec = spec.map_attention(lambda own: replace(own, qkv_bias=bias))
    return replace(spec, norm_eps=config.number("rms_norm_eps", norm_eps))


FAMILIES.register("GlmForCausalLM")(Family(read_spec, NAMES))
