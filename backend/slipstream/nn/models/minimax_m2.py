"""MiniMax-M2: Mixtral's names, routing by sigmoids and a bias, and norms of queries and keys over all heads at once."""

from __future__ import annotations

from dataclasses import replace

from slipstream_kernels.ops import RoutingRule

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import ExpertsSpec, RouterSpec
from slipstream.nn.models import mixtral
from slipstream.nn.models.common import base_spec
from slipstream.nn.models.family import FAMILIES, Family
from slipstream.nn.models.mixture import with_experts
from slipstream.nn.models.module_lists import ATTENTION_PARTS
from slipstream.nn.spec import DecoderSpec

NAMES = {**mixtral.NAMES, "selection_bias": mixtral.EXPERTS}


def read_spec(config: HFConfig) -> DecoderSpec:
    config.choice("qk_norm_type", ("per_layer",), "per_layer")
    config.choice("scoring_func", ("sigmoid",), "sigmoid")
    for key in ("use_qk_norm", "use_routing_bias"):
        if not config.boolean(key, True):
            raise config.error(key, "must be true")
    if config.has("attn_type_list") and set(config.integers("attn_type_list")) != {1}:
        raise config.error("attn_type_list", "must be of ones: layers of linear attention are not served")
    if config.has("rotary_dim") and not config.has("partial_rotary_factor"):
        part = config.integer("rotary_dim") / config.integer("head_dim")
        config = config.with_values(partial_rotary_factor=part)
    config = config.with_defaults(rope_theta=5_000_000.0)
    spec = base_spec(config, ATTENTION_PARTS, rotated_part=1.0)
    spec = spec.map_attention(lambda own: replace(own, qk_norm="flat"))
    routing = RouterSpec(config.integer("num_experts_per_tok"), RoutingRule("sigmoid"), selection_bias=True)
    size, num_experts = config.integer("intermediate_size"), config.integer("num_local_experts")
    return with_experts(config, spec, NAMES, ExpertsSpec(spec.hidden_size, size, num_experts, routing))


FAMILIES.register("MiniMaxM2ForCausalLM")(Family(read_spec, NAMES))
