"""Mixtral: Mistral with experts in place of the MLP, each token's two of eight in the published ones.

Source: arXiv:2401.04088.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models import mistral
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
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
    return replace(mistral.read_spec(config), experts=ExpertsSpec(num_experts, per_token))


FAMILIES.register("MixtralForCausalLM")(Family(read_spec, NAMES))
