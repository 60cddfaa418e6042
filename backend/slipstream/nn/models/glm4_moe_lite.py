"""GLM-4.7-Flash: latent attention as in DeepSeek-V3, with wider heads, and the experts of GLM-4.5."""

from __future__ import annotations

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.deepseek import V3_NAMES
from slipstream.nn.models.family import FAMILIES, Family
from slipstream.nn.models.glm4_moe import read_experts
from slipstream.nn.models.latent import latent_parts, latent_spec
from slipstream.nn.models.mixture import dense_layers, with_experts
from slipstream.nn.spec import DecoderSpec


def read_spec(config: HFConfig) -> DecoderSpec:
    config = config.with_defaults(rms_norm_eps=1e-5, routed_scaling_factor=1.8)
    experts = read_experts(config, config.integer("hidden_size"))
    if config.values.get("rope_interleave", True) is None:  # Hugging Face's class takes none either
        raise config.error("rope_interleave", "must be true or false")
    spec = latent_spec(config, V3_NAMES, config.boolean("rope_interleave", True))
    return with_experts(config, spec, V3_NAMES, experts, dense_layers(config, spec.num_layers, 1), latent_parts(config))


FAMILIES.register("Glm4MoeLiteForCausalLM")(Family(read_spec, V3_NAMES, has_mtp_layers=True))
