"""What families with latent attention (MLA) share: its fields of config.json and its names in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import AttentionSpec, LatentSpec
from slipstream.nn.models.common import base_spec
from slipstream.nn.models.rope import without_query_scaling
from slipstream.nn.rope_spec import RopeSpec
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_names import Name, Names

_ATTENTION = "model.layers.{layer}.self_attn"
LATENT_NAMES: Mapping[str, Name] = {
    "q_a": f"{_ATTENTION}.q_a_proj",
    "q_a_norm": f"{_ATTENTION}.q_a_layernorm",
    "q_b": f"{_ATTENTION}.q_b_proj",
    "kv_a": f"{_ATTENTION}.kv_a_proj_with_mqa",
    "kv_a_norm": f"{_ATTENTION}.kv_a_layernorm",
    "kv_b": f"{_ATTENTION}.kv_b_proj",
}


def latent_parts(config: HFConfig) -> tuple[str, ...]:
    """The linear layers of its attention, as checkpoints store them."""
    queries = ("q_a", "q_b") if config.has("q_lora_rank") else ("q",)
    return (*queries, "kv_a", "kv_b", "o")


def latent_spec(config: HFConfig, names: Names, is_interleaved: bool) -> DecoderSpec:
    """As base_spec, with latent attention. is_interleaved: neighbours are a pair of a position's rotation.

    Raises ConfigError for biases.
    """
    rope_dim, nope_dim = config.integer("qk_rope_head_dim"), config.integer("qk_nope_head_dim")
    if config.boolean("attention_bias", False):
        raise config.error("attention_bias", "must be false: latent attention is served without biases")
    of_rope = config.with_values(head_dim=rope_dim)
    if rope_dim % 2:
        raise config.error("qk_rope_head_dim", "must be even: features are rotated in pairs")
    spec = base_spec(of_rope, latent_parts(config), names, is_interleaved=is_interleaved)
    q_rank = config.integer("q_lora_rank") if config.has("q_lora_rank") else 0
    latent = LatentSpec(config.integer("kv_lora_rank"), nope_dim, rope_dim, config.integer("v_head_dim"), q_rank)
    head_dim = nope_dim + rope_dim

    def change(own: AttentionSpec) -> AttentionSpec:
        assert own.rope is not None
        scale = head_dim**-0.5 * _score_factor(config, own.rope)
        rope = without_query_scaling(own.rope)
        return replace(own, num_kv_heads=1, head_dim=head_dim, rope=rope, scale=scale, latent=latent)

    return spec.map_attention(change)


def _score_factor(config: HFConfig, rope: RopeSpec) -> float:
    """DeepSeek's factor of scores beside scaled positions: the square of YaRN's factor by mscale_all_dim."""
    section = config.section("rope_scaling") or config.section("rope_parameters")
    if section is None or not section.values.get("mscale_all_dim") or rope.type == "default" or rope.factor <= 1:
        return 1.0
    return (0.1 * section.number("mscale_all_dim") * math.log(rope.factor) + 1.0) ** 2
