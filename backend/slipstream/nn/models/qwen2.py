"""Qwen2 and Qwen2.5: a bias on query, key and value only; sliding windows on the upper layers when switched on."""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.common import base_spec, sliding_windows, with_windows
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.spec import DecoderSpec


def read_spec(config: HFConfig) -> DecoderSpec:
    spec = base_spec(config).map_attention(lambda attention: replace(attention, qkv_bias=True))
    return with_windows(spec, sliding_windows(config, spec.num_layers))


FAMILIES.register("Qwen2ForCausalLM")(Family(read_spec, LLAMA_NAMES))
# MiMo 7B, whose layer for multi-token prediction is not served
FAMILIES.register("MiMoForCausalLM")(Family(read_spec, LLAMA_NAMES, ignored_prefixes=("model.mtp_layers.",)))
