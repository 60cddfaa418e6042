"""Mixtral: Mistral with experts in place of the MLP, of which each token takes two of eight in the published models.

Source: arXiv:2401.04088.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import ExpertsSpec, RouterSpec
from slipstream.nn.models.common import base_spec
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.models.mistral import with_one_window
from slipstream.nn.models.module_lists import ATTENTION_PARTS, MLP_PARTS, linear_modules
from slipstream.nn.models.quantization import read_stored_format
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
    num_experts, per_token = config.integer("num_local_experts", 8), config.integer("num_experts_per_tok", 2)
    if per_token > num_experts:
        raise config.error("num_experts_per_tok", f"must be at most num_local_experts={num_experts}")
    spec = with_one_window(config, base_spec(config, ATTENTION_PARTS))
    modules = linear_modules(NAMES, MLP_PARTS, spec.num_layers, num_experts)
    size = config.integer("intermediate_size")
    experts = ExpertsSpec(spec.hidden_size, size, num_experts, RouterSpec(per_token))
    spec = spec.map_layers(lambda _, layer: replace(layer, mlp=experts))
    return replace(spec, expert_format=read_stored_format(config, modules))


FAMILIES.register("MixtralForCausalLM")(Family(read_spec, NAMES))
