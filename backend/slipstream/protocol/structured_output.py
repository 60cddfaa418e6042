"""The grammar that a request asks its output to follow: TensorRT-LLM's two tensors, or vLLM's structured_outputs.

Standard library only, no state; runs on the input thread. Knows the spellings of clients, not grammars.
"""

from __future__ import annotations

import json
import re
from typing import Any

from slipstream.core.errors import RequestError
from slipstream.core.sampling_params import Guide
from slipstream.core.setting_values import read_text, read_texts, refuse
from slipstream.core.settings import GUIDE_TYPES
from slipstream.protocol.client_settings import Settings

_ANY_OBJECT = '{"type": "object", "additionalProperties": true}'
# vLLM's word -> ours
_GUIDES = {"json": "json_schema", "regex": "regex", "grammar": "ebnf_grammar", "structural_tag": "structural_tag"}
_WHITESPACE = re.compile(r"(?:\[[ \\ntr]{1,10}\]| |\\s)(?P<many>[*?]|\{(?:0?,)?(?P<most>\d{1,4})\})")


def read_guide(settings: Settings) -> Guide | None:
    """What the output must match, or None. Raises RequestError for values that name no grammar, or more than one; a
    grammar that is not one is refused when it is compiled."""
    guide_type, text = settings.get("guided_decoding_guide_type"), settings.get("guided_decoding_guide", "")
    if guide_type:
        return Guide(guide_type, text)
    if text:
        raise RequestError("guided_decoding_guide_type", f"missing, accepted: {', '.join(GUIDE_TYPES)}")
    given_as = settings.spelled("structured_outputs")
    asked = {name: value for name, value in settings.get("structured_outputs", {}).items() if value is not None}
    max_whitespace = _max_whitespace(given_as, asked)
    if not asked:
        return None
    name, value = next(iter(asked.items()))
    if len(asked) > 1 or name not in (*_GUIDES, "json_object", "choice"):
        raise refuse(given_as, asked, "one of json, json_object, regex, grammar, choice and structural_tag")
    field = f"{given_as}.{name}"
    if name == "json_object":
        name, value = "json", _ANY_OBJECT if value else None
        if value is None:
            return None
    if name == "choice":
        if not (choices := read_texts(field, value)):
            raise refuse(field, value, "a list of at least one text")
        return Guide("regex", "|".join(f"({re.escape(choice)})" for choice in choices))
    if name in ("json", "structural_tag") and isinstance(value, dict):
        value = json.dumps(value)
    guide = Guide(_GUIDES[name], read_text(field, value))
    return guide if max_whitespace is None else _with_whitespace(guide, max_whitespace, field)


def _max_whitespace(given_as: str, asked: dict[str, Any]) -> int | None:
    """Takes what is said of the white space between JSON tokens out of `asked`: characters in a row, None: as usual."""
    if asked.pop("disable_additional_properties", False) is not False:
        raise refuse(f"{given_as}.disable_additional_properties", True, "false; a schema's additionalProperties")
    asked.pop("disable_fallback", None)  # there is one backend of grammars
    is_compact = asked.pop("disable_any_whitespace", False)
    if not isinstance(is_compact, bool):
        raise refuse(f"{given_as}.disable_any_whitespace", is_compact, "true or false")
    pattern = asked.pop("whitespace_pattern", None)
    if pattern is None:
        return 0 if is_compact else None
    found = _WHITESPACE.fullmatch(pattern) if isinstance(pattern, str) else None
    if pattern == "" or is_compact:
        return 0
    if found is None:
        accepted = 'white space that may be absent: "", or a character, a class or \\s with *, ? or {0,n}'
        raise refuse(f"{given_as}.whitespace_pattern", pattern, accepted)
    return int(found["most"]) if found["most"] else 1 if found["many"] == "?" else None


def _with_whitespace(guide: Guide, max_whitespace: int, field: str) -> Guide:
    if guide.type != "json_schema":
        raise RequestError(field, "disable_any_whitespace and whitespace_pattern are of json and json_object")
    try:
        schema = json.loads(guide.text)
    except (ValueError, RecursionError):
        return guide  # refused with its reason where grammars are checked
    form = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": max_whitespace}
    return Guide("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
