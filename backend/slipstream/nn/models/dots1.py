"""dots.llm1: Qwen3's attention, with small experts routed as in DeepSeek-V3 behind dense first layers.

Source: arXiv:2506.05767.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.common import WINDOW, base_spec, windows_by_type, with_windows
from slipstream.nn.models.family import FAMILIES, Family
from slipstream.nn.models.glm4_moe import NAMES, read_experts
from slipstream.nn.models.mixture import with_experts
from slipstream.nn.models.module_lists import ATTENTION_PARTS
from slipstream.nn.spec import DecoderSpec

FIRST_WINDOW = 62  # layer from which on there are windows, where a config does not state it: none in the published ones


def read_spec(config: HFConfig) -> DecoderSpec:
    config.choice("scoring_func", ("noaux_tc", "sigmoid"), "noaux_tc")  # two names of the same
    config.integer("n_shared_experts")  # without a default in this family
    bias = config.boolean("attention_bias", False)
    spec = base_spec(config, ATTENTION_PARTS)
    spec = spec.map_attention(lambda own: replace(own, qk_norm="head", qkv_bias=bias, o_bias=bias))
    experts = read_experts(config.with_defaults(norm_topk_prob=False), spec.hidden_size)
    dense = range(config.integer("first_k_dense_replace", 0, minimum=0))
    spec = with_experts(config, spec, NAMES, experts, dense)
    first = config.integer("max_window_layers", FIRST_WINDOW, minimum=0)
    windowed = config.with_unstated(sliding_window=WINDOW)
    return with_windows(spec, windows_by_type(windowed, spec.num_layers, lambda layer: layer >= first))


FAMILIES.register("Dots1ForCausalLM")(Family(read_spec, NAMES))
