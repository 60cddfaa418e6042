"""Mixtral: Mistral with experts in place of the MLP, of which each token takes two of eight in the published models.

Source: arXiv:2401.04088.
"""

from __future__ import annotations

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import ExpertsSpec, RouterSpec
from slipstream.nn.models.common import base_spec
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.models.mistral import with_one_window
from slipstream.nn.models.mixture import with_experts
from slipstream.nn.models.module_lists import ATTENTION_PARTS
from slipstream.nn.spec import DecoderSpec

EXPERTS = "model.layers.{layer}.block_sparse_moe"
NAMES = {
    **LLAMA_NAMES,
    "router": f"{EXPERTS}.gate",
    "expert_gate": f"{EXPERTS}.experts.{{expert}}.w1",
    "expert_up": f"{EXPERTS}.experts.{{expert}}.w3",
    "expert_down": f"{EXPERTS}.experts.{{expert}}.w2",
}


def read_spec(config: HFConfig) -> DecoderSpec:
    config = config.with_defaults(rms_norm_eps=1e-5, rope_theta=1_000_000.0)
    spec = with_one_window(config, base_spec(config, ATTENTION_PARTS))
    routing = RouterSpec(config.integer("num_experts_per_tok", 2))
    num_experts = config.integer("num_local_experts", 8)
    experts = ExpertsSpec(spec.hidden_size, config.integer("intermediate_size"), num_experts, routing)
    return with_experts(config, spec, NAMES, experts)


FAMILIES.register("MixtralForCausalLM")(Family(read_spec, NAMES))
