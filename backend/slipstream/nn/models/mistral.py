"""Mistral: Llama without biases, and one sliding window for all layers when the config sets one."""

from __future__ import annotations

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.common import WINDOW, base_spec, with_windows
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.spec import DecoderSpec


def read_spec(config: HFConfig) -> DecoderSpec:
    return with_one_window(config.with_unstated(sliding_window=WINDOW), base_spec(config))


def with_one_window(config: HFConfig, spec: DecoderSpec) -> DecoderSpec:
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    return with_windows(spec, (window,) * spec.num_layers)


FAMILIES.register("MistralForCausalLM")(Family(read_spec, LLAMA_NAMES))
