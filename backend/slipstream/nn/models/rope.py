"""Rotary parameters of a Hugging Face config -> RopeSpec, in the spelling of transformers 4 and of transformers 5."""

from __future__ import annotations

import math

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import RopeSpec

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
DEFAULT_THETA = 10_000.0


def read_rope(config: HFConfig, head_dim: int) -> RopeSpec:
    """rope_parameters (transformers 5) or rope_theta + rope_scaling (4). Raises ConfigError for an unknown type."""
    top_theta = config.number("rope_theta", DEFAULT_THETA)
    section = config.section("rope_scaling") or config.section("rope_parameters")
    for place in (config, section):
        if place is not None and place.number("partial_rotary_factor", 1.0) != 1.0:
            raise place.error("partial_rotary_factor", "must be 1.0: this family rotates the whole head")
    if section is None:
        return RopeSpec("default", top_theta, head_dim)
    nested = [key for key, value in section.values.items() if isinstance(value, dict)]
    if nested:
        raise section.error(nested[0], "must be a plain value: one rope for all layers is served")
    theta = section.number("rope_theta", top_theta)
    kind = section.choice("rope_type" if section.has("rope_type") else "type", ROPE_TYPES, "default")
    if kind == "default":
        return RopeSpec(kind, theta, head_dim)
    max_positions = config.integer("max_position_embeddings")
    if kind == "linear":
        return RopeSpec(kind, theta, head_dim, section.number("factor"))
    if kind == "dynamic":
        return RopeSpec(kind, theta, head_dim, section.number("factor"), max_positions)
    original = section.integer("original_max_position_embeddings", max_positions)
    original = config.integer("original_max_position_embeddings", original)
    if kind == "llama3":
        return _llama3(section, theta, head_dim, original)
    return _yarn(section, theta, head_dim, original, max_positions)


def _llama3(section: HFConfig, theta: float, head_dim: int, original: int) -> RopeSpec:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        raise section.error("high_freq_factor", f"must be above low_freq_factor={low}")
    factor = section.number("factor")
    return RopeSpec("llama3", theta, head_dim, factor, original, low_freq_factor=low, high_freq_factor=high)


def _yarn(section: HFConfig, theta: float, head_dim: int, original: int, max_positions: int) -> RopeSpec:
    factor = section.number("factor", max_positions / original)
    return RopeSpec(
        "yarn",
        theta,
        head_dim,
        factor,
        original,
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        truncate=section.boolean("truncate", True),
        attention_factor=section.number("attention_factor", _yarn_attention_factor(section, factor)),
    )


def _yarn_attention_factor(section: HFConfig, factor: float) -> float:
    """The scale of cos and sin when none is given: arXiv:2309.00071 (22); with both mscales, DeepSeek's quotient."""

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    # a 0 means "not set" in DeepSeek-like configs
    if section.values.get("mscale") and section.values.get("mscale_all_dim"):
        return scale(section.number("mscale")) / scale(section.number("mscale_all_dim"))
    return scale(1.0)
