"""Mixtral: Mistral with experts in place of the MLP, each token's two of eight in the published ones.

Source: arXiv:2401.04088.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.common import base_spec
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.models.mistral import with_window
from slipstream.nn.models.module_lists import ATTENTION_PARTS, MLP_PARTS, linear_modules
from slipstream.nn.models.quantization import read_stored_format
from slipstream.nn.spec import DecoderSpec, ExpertsSpec

EXPERTS = "model.layers.{layer}.block_sparse_moe"
NAMES = {
    **LLAMA_NAMES,
    "router": f"{EXPERTS}.gate",
    "gate": f"{EXPERTS}.experts.{{expert}}.w1",
    "up": f"{EXPERTS}.experts.{{expert}}.w3",
    "down": f"{EXPERTS}.experts.{{expert}}.w2",
}


def read_spec(config: HFConfig) -> DecoderSpec:
    num_experts, per_token = config.integer("num_local_experts", 8), config.integer("num_experts_per_tok", 2)
    if per_token > num_experts:
        raise config.error("num_experts_per_tok", f"must be at most num_local_experts={num_experts}")
    spec = with_window(config, base_spec(config, ATTENTION_PARTS))
    modules = linear_modules(NAMES, MLP_PARTS, spec.num_layers, num_experts)
    stored = read_stored_format(config, modules)
    return replace(spec, experts=ExpertsSpec(num_experts, per_token, stored_format=stored))


FAMILIES.register("MixtralForCausalLM")(Family(read_spec, NAMES))
