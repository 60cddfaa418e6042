"""ERNIE 4.5: neighbouring features of a head are rotated in pairs; the larger models have experts behind dense layers.

Experts are ranked by their softmax and a bias. Source: the ERNIE 4.5 technical report (Baidu, 2025).
"""

from __future__ import annotations

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import DenseSpec, ExpertsSpec, RouterSpec
from slipstream.nn.load_transforms import Unsqueeze
from slipstream.nn.models.common import base_spec, with_biases
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.models.mixture import SHARED, expert_names, with_experts
from slipstream.nn.models.module_lists import ATTENTION_PARTS, MLP_PARTS
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_names import Names, Stored

HEAD_DIM, THETA = 128, 500_000.0  # where a config does not state them
LEAST_SUM = 1e-6  # up to here moe_norm_min, below which no sum of a token's weights is let, changes no weight
MLP = "model.layers.{layer}.mlp"
MOE_NAMES: Names = {
    **expert_names(MLP, shared="shared_experts"),
    "selection_bias": Stored(f"{MLP}.moe_statics", (Unsqueeze(),)),
}
MTP = "model.mtp_"  # layers for multi-token prediction


def read_dense(config: HFConfig) -> DecoderSpec:
    bias = config.boolean("use_bias", False)
    spec = _base(config.with_unstated(head_dim=HEAD_DIM), (*ATTENTION_PARTS, *MLP_PARTS))
    return with_biases(spec, bias, bias, bias)


def read_moe(config: HFConfig) -> DecoderSpec:
    config = config.renamed(num_experts="moe_num_experts", num_experts_per_tok="moe_k")
    if config.boolean("use_bias", False):
        raise config.error("use_bias", "must be false in models with experts")
    if config.number("moe_norm_min", 1e-12) > LEAST_SUM:
        raise config.error("moe_norm_min", f"must be at most {LEAST_SUM:g}")
    spec = _base(config, ATTENTION_PARTS)
    size, num_shared = config.integer("moe_intermediate_size"), config.integer("moe_num_shared_experts", 2, minimum=0)
    shared = DenseSpec(spec.hidden_size, size * num_shared, prefix=SHARED) if num_shared else None
    routing = RouterSpec(config.integer("num_experts_per_tok", 6), selection_bias=True)
    experts = ExpertsSpec(spec.hidden_size, size, config.integer("num_experts", 64), routing, shared)
    return with_experts(config, spec, MOE_NAMES, experts, _dense_layers(config, spec.num_layers))


def _base(config: HFConfig, linear_parts: tuple[str, ...]) -> DecoderSpec:
    config = config.with_defaults(rms_norm_eps=1e-5, rope_theta=THETA, tie_word_embeddings=True)
    return base_spec(config, linear_parts, is_interleaved=True)


def _dense_layers(config: HFConfig, num_layers: int) -> list[int]:
    """All but each moe_layer_interval-th from moe_layer_start_index to moe_layer_end_index; -1: the last one."""
    first, last = config.integer("moe_layer_start_index", 1, minimum=0), config.integer("moe_layer_end_index", -1, -1)
    step, last = config.integer("moe_layer_interval", 1), num_layers - 1 if last == -1 else last
    return [layer for layer in range(num_layers) if (layer + 1) % step or not first <= layer <= last]


FAMILIES.register("Ernie4_5ForCausalLM")(Family(read_dense, LLAMA_NAMES))
FAMILIES.register("Ernie4_5_ForCausalLM")(Family(read_dense, LLAMA_NAMES))  # as the first checkpoints have it
FAMILIES.register("Ernie4_5_MoeForCausalLM")(Family(read_moe, MOE_NAMES, ignored_prefixes=(MTP,)))
