"""InternLM3: Llama with heads of 128, and with names of its own for biases."""

from __future__ import annotations

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.common import base_spec, with_biases
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.spec import DecoderSpec

HEAD_DIM = 128  # where a config does not state it


def read_spec(config: HFConfig) -> DecoderSpec:
    """qkv_bias and bias, or as transformers saves them: attention_bias and mlp_bias."""
    qkv_bias = config.boolean("qkv_bias", config.boolean("attention_bias", False))
    bias = config.boolean("bias", config.boolean("mlp_bias", False))
    config = config.with_defaults(rms_norm_eps=1e-5).with_unstated(head_dim=HEAD_DIM)
    return with_biases(base_spec(config), qkv_bias, bias, bias)


FAMILIES.register("InternLM3ForCausalLM")(Family(read_spec, LLAMA_NAMES))
