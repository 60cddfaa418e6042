"""The load parameter `rope_scaling`: a JSON object that takes the place of the rope scaling in config.json.

Checked here: JSON, the fields of each type and the length. models/rope.py checks the values of the fields.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from slipstream.core.errors import ConfigError
from slipstream.nn.hf_config import LARGEST_NUMBER, HFConfig
from slipstream.nn.models.rope import FULL, QUERY_SCALING, ROPE_TYPES
from slipstream.nn.spec import MAX_POSITIONS, DecoderSpec

FIELD = "rope_scaling"
_KEPT = ("rope_theta", "partial_rotary_factor")  # of the checkpoint, unless the parameter has them
_ORIGINAL, _LENGTH = "original_max_position_embeddings", "max_position_embeddings"
_YARN = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
_LONGROPE = ("factor", _ORIGINAL, "short_factor", "long_factor", "attention_factor")
_LONGROPES = ("longrope", "su")  # su: its first name
_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", _ORIGINAL, *_YARN),
    **dict.fromkeys(_LONGROPES, _LONGROPE),
}

log = logging.getLogger(__name__)


def read_scaled_spec(read: Callable[[HFConfig], DecoderSpec], config: HFConfig, rope_scaling: str) -> DecoderSpec:
    """The spec of a config whose rope scaling is the one given. Warns of what a changed scaling costs.

    read: the family's. rope_scaling: JSON. Raises ConfigError for a scaling that is malformed, that the family does not
    read, or that serves more than 2^24 tokens.
    """
    scaling = _parse(rope_scaling)
    spec = read(_with_scaling(config, scaling))
    kind = "longrope" if scaling["rope_type"] in _LONGROPES else scaling["rope_type"]
    ropes = {attention.rope for attention in spec.attentions if attention.rope is not None}
    if not ropes:
        raise ConfigError(FIELD, rope_scaling, f"{spec.architecture} of this size has no rotary embedding to scale")
    scaled = [rope for rope in ropes if rope.type == kind]
    if not scaled:
        raise ConfigError(FIELD, rope_scaling, f"{spec.architecture} does not read a rope scaling")
    if len(scaled) < len(ropes):  # others are of layers with a window, which see near tokens alone in any length
        lengths = [rope.max_model_len(spec.max_position_embeddings) for rope in scaled]
        spec = replace(spec, max_position_embeddings=min(lengths))
    if spec.max_model_len > MAX_POSITIONS:
        raise ConfigError(FIELD, rope_scaling, f"serves {spec.max_model_len} tokens, accepted: up to {MAX_POSITIONS}")
    _warn(kind, spec.max_model_len, read(config).max_model_len)
    return spec


def _parse(text: str) -> dict[str, object]:
    example = 'a JSON object such as {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(FIELD, text, f"accepted: {example}") from None
    if not isinstance(given, dict):
        raise ConfigError(FIELD, text, f"accepted: {example}")
    old = given.pop("type", None)  # the spelling of transformers 4
    kind = given.setdefault("rope_type", old)
    if old not in (None, kind):
        raise ConfigError(f"{FIELD} type", old, f"accepted beside rope_type={kind}: the same, or leave it out")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ConfigError(f"{FIELD} rope_type", kind, f"accepted: {', '.join(ROPE_TYPES)}")
    accepted = ("rope_type", *_KEPT, *_FIELDS[kind])
    for key, value in given.items():
        if key not in accepted:
            raise ConfigError(f"{FIELD} {key}", value, f"no field of {kind}; accepted: {', '.join(accepted)}")
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise ConfigError(f"{FIELD} {key}", value, "must be finite")
    return given


def _with_scaling(config: HFConfig, scaling: Mapping[str, object]) -> HFConfig:
    """The config with this scaling: in text_config of models that also see, for full layers where types differ."""
    text = config.section("text_config")
    if text is not None:
        scaled = _with_scaling(text, scaling)
        return config.with_values(text_config=scaled.values).with_parameters(scaled.parameters)
    found = config.values.get("rope_parameters") or config.values.get(FIELD)
    stored = found if isinstance(found, dict) else {}
    is_by_type = isinstance(stored.get(FULL), dict)
    whole = _merged(config, stored[FULL] if is_by_type else stored, scaling)
    ropes = {"rope_parameters": {**stored, FULL: whole} if is_by_type else None, FIELD: None if is_by_type else whole}
    # an original length beside the scaling would win over the one in it
    declared = config.values.get(_LENGTH)
    length = _stretched_length(declared, whole)
    set_here = ("rope_parameters", FIELD, FULL, *(() if length == declared else (_LENGTH,)))
    changed = {**ropes, _ORIGINAL: None, _LENGTH: length}
    return config.with_values(**changed).with_parameters(dict.fromkeys(set_here, FIELD))


def _merged(config: HFConfig, stored: Mapping[str, object], scaling: Mapping[str, object]) -> dict[str, object]:
    """The new scaling with what it leaves to the checkpoint: theta, the rotated part, the original length and a scaling
    of queries."""
    kept = {key: stored[key] for key in (*_KEPT, QUERY_SCALING) if key in stored}
    if _ORIGINAL in _FIELDS[str(scaling["rope_type"])] or QUERY_SCALING in kept:
        # null: the family's length, as in config.json
        kept[_ORIGINAL] = config.values.get(_ORIGINAL) or stored.get(_ORIGINAL) or config.values.get(_LENGTH)
    return {**kept, **scaling}


def _stretched_length(declared: object, scaling: Mapping[str, object]) -> object:
    """max_position_embeddings, which llama3 and longrope configs state stretched: factor times the original length."""
    numbers = (declared, scaling.get("factor"), scaling.get(_ORIGINAL))
    if scaling["rope_type"] not in ("llama3", *_LONGROPES):
        return declared
    if not all(type(number) in (int, float) and 0 < number <= LARGEST_NUMBER for number in cast("Any", numbers)):
        return declared  # which is refused where it is read
    length, factor, original = cast("tuple[int, float, int]", numbers)
    return max(length, int(original * factor))


def _warn(kind: object, length: int, declared: int) -> None:
    if length > declared:
        told = "the checkpoint declares %d tokens and may not have been trained on more: read its model card"
        log.warning("rope_scaling serves up to %d tokens; " + told, length, declared)
    if kind in ("linear", "yarn", "llama3"):
        log.warning("rope_scaling changes short prompts, too: give it only where long prompts are served (%s)", kind)
