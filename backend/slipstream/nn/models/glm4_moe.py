"""GLM-4.5, 4.6 and 4.7: many small experts, ranked by the sigmoid of their logits and a bias, and one that all share.

The first layers are dense. Half of a head is rotated, in halves. Source: arXiv:2508.06471.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream_kernels.ops import RoutingRule

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import DenseSpec, ExpertsSpec, RouterSpec
from slipstream.nn.models.common import base_spec
from slipstream.nn.models.family import FAMILIES, Family
from slipstream.nn.models.glm import ROTATED_PART
from slipstream.nn.models.mixture import SHARED, expert_names, read_groups, with_experts
from slipstream.nn.models.module_lists import ATTENTION_PARTS
from slipstream.nn.spec import DecoderSpec

MLP = "model.layers.{layer}.mlp"
NAMES = {**expert_names(MLP, shared="shared_experts"), "selection_bias": f"{MLP}.gate"}


def read_spec(config: HFConfig) -> DecoderSpec:
    bias, norm = config.boolean("attention_bias", False), "head" if config.boolean("use_qk_norm", False) else ""
    config = config.with_defaults(rms_norm_eps=1e-5)
    spec = base_spec(config, ATTENTION_PARTS, rotated_part=ROTATED_PART)
    spec = spec.map_attention(lambda own: replace(own, qkv_bias=bias, qk_norm=norm))
    dense = range(config.integer("first_k_dense_replace", 1, minimum=0))
    return with_experts(config, spec, NAMES, read_experts(config, spec.hidden_size), dense)


def read_experts(config: HFConfig, hidden_size: int) -> ExpertsSpec:
    """Those of DeepSeek-V3, too, in the names of its config."""
    rule = RoutingRule(
        "sigmoid",
        config.boolean_or_null("norm_topk_prob", True),
        config.number("routed_scaling_factor", 1.0),
        *read_groups(config, least_size=2),  # of which the two best are summed
        "top2sum",
    )
    routing = RouterSpec(config.integer("num_experts_per_tok"), rule, selection_bias=True)
    size, num_shared = config.integer("moe_intermediate_size"), config.count_or_null("n_shared_experts", 1)
    shared = DenseSpec(hidden_size, size * num_shared, prefix=SHARED) if num_shared else None
    return ExpertsSpec(hidden_size, size, config.integer("n_routed_experts"), routing, shared)


FAMILIES.register("Glm4MoeForCausalLM")(Family(read_spec, NAMES, has_mtp_layers=True))
