"""Rotary parameters of a Hugging Face config -> RopeSpec, in the spelling of transformers 4 and of transformers 5."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.rope_spec import RopeSpec

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "su")
DEFAULT_THETA = 10_000.0
LEAST_FACTOR = 0.001  # positions divided by much less are beyond float32
ORIGINAL_LENGTH = "original_max_position_embeddings"
# Beta of 1 + beta · ln(1 + ⌊position / original length⌋), by which Ministral 3 multiplies queries.
QUERY_SCALING = "llama_4_scaling_beta"
DUAL_CHUNKS = "dual_chunk_attention_config"
SLIDING, FULL = "sliding_attention", "full_attention"  # of layer_types

log = logging.getLogger(__name__)


def read_rope(config: HFConfig, head_dim: int, rotated_part: float | None = None) -> RopeSpec:
    """rope_parameters (transformers 5) or rope_theta + rope_scaling (4). Raises ConfigError for an unknown type.

    rotated_part: what of a head the family rotates where its config does not say. None: all of it, and a config that
    says otherwise is refused.
    """
    top_theta = config.number("rope_theta", DEFAULT_THETA)
    section = config.section("rope_scaling") or config.section("rope_parameters")
    head_dim = _rotary_dim(config, section, head_dim, rotated_part)
    if section is None:
        return RopeSpec("default", top_theta, head_dim)
    nested = [key for key, value in section.values.items() if isinstance(value, dict)]
    if nested:
        raise section.error(nested[0], "must be a plain value: one rope for all layers is served")
    rope = _rope(config, section, head_dim, top_theta)
    if not section.values.get(QUERY_SCALING):
        return rope
    beta, length = section.number(QUERY_SCALING), section.integer(ORIGINAL_LENGTH)
    return replace(rope, query_beta=beta, query_length=length)


def without_query_scaling(rope: RopeSpec) -> RopeSpec:
    """For attention that does not scale queries: it serves the tokens before the first that would be multiplied."""
    if not rope.query_beta:
        return rope
    told = "up to %d tokens are served: %s scales later queries, which this attention does not"
    log.warning(told, rope.query_length, QUERY_SCALING)
    return replace(rope, query_beta=0.0, query_length=0, longest=rope.query_length)


def within_first_chunk(config: HFConfig, rope: RopeSpec) -> RopeSpec:
    """For attention that gives far tokens positions of their own (Qwen's models of 1M tokens), which no code here does:
    it serves the tokens that have the usual ones. Source: dual chunk attention, arXiv:2402.17463."""
    section = config.section(DUAL_CHUNKS)
    if section is None:
        return rope
    size, local = section.integer("chunk_size", 8192), section.integer("local_size", 1024)
    longest = min(size - local, section.integer(ORIGINAL_LENGTH, size))
    if longest < 1:
        raise section.error("local_size", f"must be below chunk_size={size}")
    log.warning("up to %d tokens are served: %s, for more, is not served", longest, DUAL_CHUNKS)
    return replace(rope, longest=longest)


def _rope(config: HFConfig, section: HFConfig, head_dim: int, top_theta: float) -> RopeSpec:
    """top_theta: outside the section."""
    theta = section.number("rope_theta", top_theta)
    if theta <= 1:
        raise (section if section.has("rope_theta") else config).error("rope_theta", "must be a number above 1")
    kind = section.choice("rope_type" if section.has("rope_type") else "type", ROPE_TYPES, "default")
    if kind == "default":
        return RopeSpec(kind, theta, head_dim)
    max_positions = config.integer("max_position_embeddings")
    if kind == "linear":
        return RopeSpec(kind, theta, head_dim, _factor(section))
    if kind == "dynamic":
        return RopeSpec(kind, theta, head_dim, _factor(section), max_positions)
    original = section.integer(ORIGINAL_LENGTH, max_positions)
    original = config.integer(ORIGINAL_LENGTH, original)
    if kind == "llama3":
        return _llama3(section, theta, head_dim, original)
    if kind in ("longrope", "su"):
        return _longrope(section, theta, head_dim, original, max_positions)
    return _yarn(section, theta, head_dim, original, max_positions)


def _factor(section: HFConfig, default: float | None = None) -> float:
    """By how much positions are stretched. default: where the config does not say; None: it must."""
    factor = section.number("factor") if default is None else section.number("factor", default)
    if factor < LEAST_FACTOR:
        raise section.error("factor", f"must be a number of at least {LEAST_FACTOR}")
    return factor


def with_rope_of(config: HFConfig, layer_type: str) -> HFConfig:
    """The config as one of a model whose layers all have the rope that rope_parameters has for those of a type."""
    section = config.section("rope_parameters")
    own = None if section is None else section.section(layer_type)
    return config if own is None else config.with_values(rope_parameters=own.values, rope_scaling=None)


def read_local_rope(config: HFConfig, head_dim: int, theta: float) -> RopeSpec:
    """The rope of windowed layers, in families whose rope_scaling is that of the others. theta: if none is stored."""
    own = with_rope_of(config, SLIDING)
    return RopeSpec("default", theta, head_dim) if own is config else read_rope(own, head_dim)


def _rotary_dim(config: HFConfig, section: HFConfig | None, head_dim: int, rotated_part: float | None) -> int:
    part = rotated_part or 1.0
    for place in (config, section):
        if place is None or not place.has("partial_rotary_factor"):
            continue
        part = place.number("partial_rotary_factor")
        if rotated_part is None and part != 1.0:
            raise place.error("partial_rotary_factor", "must be 1.0: this family rotates the whole head")
        if part > 1.0 or int(head_dim * part) % 2 or int(head_dim * part) == 0:
            raise place.error("partial_rotary_factor", f"must leave an even part of heads of {head_dim}")
    return int(head_dim * part)


def _longrope(section: HFConfig, theta: float, rotary_dim: int, original: int, max_positions: int) -> RopeSpec:
    """Factors of short and of long sequences, one for each pair of features. Source: arXiv:2402.13753."""
    if original < 2:
        raise section.error(ORIGINAL_LENGTH, "must be at least 2, as longrope takes its logarithm")
    factor = _factor(section, max_positions / original)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeSpec(
        "longrope",
        theta,
        rotary_dim,
        factor,
        original,
        attention_factor=section.number("attention_factor", scale),
        short_factors=section.numbers("short_factor", rotary_dim // 2),
        long_factors=section.numbers("long_factor", rotary_dim // 2),
    )


def _llama3(section: HFConfig, theta: float, head_dim: int, original: int) -> RopeSpec:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        raise section.error("high_freq_factor", f"must be above low_freq_factor={low}")
    factor = _factor(section)
    return RopeSpec("llama3", theta, head_dim, factor, original, low_freq_factor=low, high_freq_factor=high)


def _yarn(section: HFConfig, theta: float, head_dim: int, original: int, max_positions: int) -> RopeSpec:
    factor = _factor(section, max_positions / original)
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
