"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with many small experts, and a shared one behind a gate of its own."""

from __future__ import annotations

from dataclasses import replace

from slipstream_kernels.ops import RoutingRule

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import DenseSpec, ExpertsSpec, RouterSpec
from slipstream.nn.models.common import WINDOW, base_spec, windows_by_type, with_windows
from slipstream.nn.models.family import FAMILIES, Family
from slipstream.nn.models.mixture import SHARED, expert_names, with_experts
from slipstream.nn.models.module_lists import ATTENTION_PARTS
from slipstream.nn.spec import DecoderSpec

MLP = "model.layers.{layer}.mlp"
NAMES = {**expert_names(MLP, shared="shared_expert"), "shared_expert_gate": f"{MLP}.shared_expert_gate"}


def read_spec(config: HFConfig) -> DecoderSpec:
    spec = base_spec(config, ATTENTION_PARTS)
    bias = config.boolean("qkv_bias", True)
    spec = spec.map_attention(lambda attention: replace(attention, qkv_bias=bias))
    shared = DenseSpec(spec.hidden_size, config.integer("shared_expert_intermediate_size"), prefix=SHARED)
    experts = replace(read_experts(config, spec.hidden_size), shared=shared, shared_gate=True)
    spec = with_experts(config, spec, NAMES, experts, dense_layers(config, spec.num_layers))
    if not config.boolean("use_sliding_window", False):
        return spec
    config = config.with_unstated(sliding_window=WINDOW)
    last = config.integer("max_window_layers", 28, minimum=0)
    windows = windows_by_type(config, spec.num_layers, lambda layer: layer % 2 == 0 and layer < last)
    return with_windows(spec, windows)


def read_experts(config: HFConfig, hidden_size: int) -> ExpertsSpec:
    """Those that tokens are routed to, in Qwen2-MoE and Qwen3-MoE."""
    rule = RoutingRule(renormalises=config.boolean("norm_topk_prob", False))
    routing = RouterSpec(config.integer("num_experts_per_tok"), rule)
    key = "num_experts" if config.has("num_experts") or not config.has("num_local_experts") else "num_local_experts"
    return ExpertsSpec(hidden_size, config.integer("moe_intermediate_size"), config.integer(key), routing)


def dense_layers(config: HFConfig, num_layers: int) -> list[int]:
    """Layers with an MLP of intermediate_size: those of mlp_only_layers, and all but each decoder_sparse_step-th."""
    step, named = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers")
    return [layer for layer in range(num_layers) if layer in named or (layer + 1) % step]


FAMILIES.register("Qwen2MoeForCausalLM")(Family(read_spec, NAMES))
