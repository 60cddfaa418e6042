"""Mistral: Llama without biases, and one sliding window for all layers when the config sets one.

Ministral 3 (its text, and Devstral 2) is the same with other defaults, up to the length at which queries are scaled.
"""

from __future__ import annotations

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.common import WINDOW, base_spec, with_windows
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.spec import DecoderSpec


def read_spec(config: HFConfig) -> DecoderSpec:
    return with_one_window(config.with_unstated(sliding_window=WINDOW), base_spec(config))


def read_ministral3(config: HFConfig) -> DecoderSpec:
    if not (config.has("rope_parameters") or config.has("rope_scaling")):
        raise config.error("rope_parameters", "is missing")
    config = config.with_defaults(rms_norm_eps=1e-5, head_dim=128)
    return with_one_window(config, base_spec(config))


def with_one_window(config: HFConfig, spec: DecoderSpec) -> DecoderSpec:
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    return with_windows(spec, (window,) * spec.num_layers)


FAMILIES.register("MistralForCausalLM")(Family(read_spec, LLAMA_NAMES))
FAMILIES.register("Ministral3ForCausalLM")(Family(read_ministral3, LLAMA_NAMES))
