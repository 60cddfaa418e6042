"""DeepSeek-V2 and V2-Lite, V3, V3.1 and R1, and models of V3's shape, such as Kimi K2: latent attention, many experts.

The first layers are dense. V2 ranks experts by their softmax, perhaps within groups; V3 by sigmoid and a bias, within
groups by their two best. Sources: arXiv:2405.04434, arXiv:2412.19437.
"""

from __future__ import annotations

from slipstream_kernels.ops import RoutingRule

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import DenseSpec, ExpertsSpec, RouterSpec
from slipstream.nn.models.family import FAMILIES, Family
from slipstream.nn.models.glm4_moe import MLP, read_experts
from slipstream.nn.models.latent import LATENT_NAMES, latent_parts, latent_spec
from slipstream.nn.models.mixture import SHARED, expert_names, read_groups, with_experts
from slipstream.nn.spec import DecoderSpec

V2_NAMES = {**expert_names(MLP, shared="shared_experts"), **LATENT_NAMES}
V3_NAMES = {**V2_NAMES, "selection_bias": f"{MLP}.gate"}
ALL_EXPERTS, IN_GROUPS = "greedy", "group_limited_greedy"  # V2's topk_method


def read_v2(config: HFConfig) -> DecoderSpec:
    config.choice("scoring_func", ("softmax",), "softmax")
    if config.boolean("norm_topk_prob", False):
        raise config.error("norm_topk_prob", "must be false in this architecture")
    in_groups = config.choice("topk_method", (ALL_EXPERTS, IN_GROUPS), ALL_EXPERTS) == IN_GROUPS
    groups = read_groups(config, least_size=1) if in_groups else (1, 1)
    rule = RoutingRule("softmax", False, config.number("routed_scaling_factor", 1.0), *groups, "max")
    hidden_size, size = config.integer("hidden_size"), config.integer("moe_intermediate_size")
    num_shared = config.count_or_null("n_shared_experts", 2)
    shared = DenseSpec(hidden_size, size * num_shared, prefix=SHARED) if num_shared else None
    routing = RouterSpec(config.integer("num_experts_per_tok"), rule)
    experts = ExpertsSpec(hidden_size, size, config.integer("n_routed_experts"), routing, shared)
    spec = latent_spec(config, V2_NAMES, is_interleaved=True)  # whatever the config says, as Hugging Face's class does
    return _with_experts(config, spec, V2_NAMES, experts, first_dense=0)


def read_v3(config: HFConfig) -> DecoderSpec:
    config.choice("scoring_func", ("sigmoid",), "sigmoid")
    config.choice("topk_method", ("noaux_tc",), "noaux_tc")
    defaults = config.with_defaults(n_group=8, topk_group=4, routed_scaling_factor=2.5)
    experts = read_experts(defaults, config.integer("hidden_size"))
    spec = latent_spec(defaults, V3_NAMES, config.boolean_or_null("rope_interleave", True))
    return _with_experts(defaults, spec, V3_NAMES, experts, first_dense=3)


def _with_experts(
    config: HFConfig, spec: DecoderSpec, names: dict, experts: ExpertsSpec, first_dense: int
) -> DecoderSpec:
    """moe_layer_freq, which Hugging Face's class passes over, is the step between layers with experts."""
    first, step = config.integer("first_k_dense_replace", first_dense, minimum=0), config.integer("moe_layer_freq", 1)
    dense = [layer for layer in range(spec.num_layers) if layer < first or layer % step]
    return with_experts(config, spec, names, experts, dense, latent_parts(config))


FAMILIES.register("DeepseekV2ForCausalLM")(Family(read_v2, V2_NAMES))
# The published equation of MTP hands on a module's output before its head, to which the last norm belongs.
FAMILIES.register("DeepseekV3ForCausalLM")(Family(read_v3, V3_NAMES, has_mtp_layers=True, mtp_hands_on="raw"))
