"""How many tokens a checkpoint takes, as its config.json says: for what does not load its model. Standard library only.

nn/models reads the same with all that families add to it, and refuses what is malformed, which is no length here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ORIGINAL, _FULL = "original_max_position_embeddings", "full_attention"


def checkpoint_length(folder: Path, rope_scaling: str = "") -> int:
    """Tokens; 0 if config.json does not say. rope_scaling: the parameter, which takes the place of the stored one."""
    try:
        told = json.loads((folder / "config.json").read_text("utf-8"))
        text = told.get("text_config") or told  # of models that also see
        return int(_length(text, json.loads(rope_scaling) if rope_scaling else None))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return 0


def _length(text: Mapping[str, Any], given: Mapping[str, Any] | None) -> Any:
    declared = text.get("max_position_embeddings") or text["seq_length"]  # ChatGLM's name
    stored = text.get("rope_scaling") or text.get("rope_parameters") or {}
    has_local_ropes = _FULL in stored
    stored = stored.get(_FULL, stored)
    scaling = stored if given is None else given
    kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
    original = scaling.get(_ORIGINAL) or text.get(_ORIGINAL) or stored.get(_ORIGINAL) or declared
    if factor is None:
        return declared
    if given is None and (has_local_ropes or kind not in ("linear", "dynamic", "yarn")):
        return declared  # stretched already; or layers with a window stay below it
    if kind in ("linear", "dynamic"):
        is_gemma = given is None and text.get("model_type") == "gemma3_text"  # with local ropes that it leaves out
        return declared if is_gemma else declared * factor
    return max(declared, original * factor)
