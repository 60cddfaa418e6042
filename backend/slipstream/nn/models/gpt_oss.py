"""gpt-oss: sinks in the softmax, a window in every other layer, experts with biases and a clamped activation.

Experts are stored in one tensor a layer. Source: arXiv:2508.10925.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import ClampedSwiglu, ExpertsSpec, RouterSpec
from slipstream.nn.models.common import base_spec, windows_by_type, with_windows
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.models.mixture import with_experts
from slipstream.nn.models.module_lists import ATTENTION_PARTS
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_names import Names, Stacked

LAYER = "model.layers.{layer}"
GATE_UP = Stacked(f"{LAYER}.mlp.experts.gate_up_proj", ("gate", "up"), "interleaved", is_transposed=True)
NAMES: Names = {
    **LLAMA_NAMES,
    "sinks": f"{LAYER}.self_attn",
    "router": f"{LAYER}.mlp.router",
    "expert_gate": GATE_UP,
    "expert_up": GATE_UP,
    "expert_down": Stacked(f"{LAYER}.mlp.experts.down_proj", ("down",), is_transposed=True),
}

# what a config that does not state it means
WINDOW, THETA = 128, 150_000.0
SCALING = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def read_spec(config: HFConfig) -> DecoderSpec:
    bias = config.boolean("attention_bias", True)
    config = config.with_defaults(rms_norm_eps=1e-5, rope_theta=THETA).with_unstated(sliding_window=WINDOW)
    if not (config.has("rope_scaling") or config.has("rope_parameters")):
        config = config.with_values(rope_scaling=SCALING)
    spec = base_spec(config, ATTENTION_PARTS, NAMES)
    spec = spec.map_attention(lambda own: replace(own, sinks=True, qkv_bias=bias, o_bias=bias))
    spec = with_windows(spec, windows_by_type(config, spec.num_layers, lambda layer: layer % 2 == 0))
    # softmax of the chosen experts' logits is that of all, renormalised
    routing = RouterSpec(config.integer("num_experts_per_tok"), logit_bias=True)
    experts = ExpertsSpec(
        spec.hidden_size,
        config.integer("intermediate_size"),
        config.integer("num_local_experts"),
        routing,
        bias=True,
        clamped=ClampedSwiglu(config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0)),
    )
    return with_experts(config, spec, NAMES, experts)


FAMILIES.register("GptOssForCausalLM")(Family(read_spec, NAMES))
