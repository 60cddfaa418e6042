"""What a client's schema or structural tag becomes before xgrammar compiles it. Only in the grammar processes.

Beside xgrammar's own formats there is `tool_calls`: the calls of a model, by xgrammar's template of its name.
"""

from __future__ import annotations

import json
from typing import Any

import xgrammar
from xgrammar.structural_tag import StructuralTag, StructuralTagItem

# xgrammar 0.2 allows control characters (a tab) in strings with minLength or maxLength, which JSON parsers reject
_LAX_CHARACTER = r"[^\"\\\r\n]"
_STRICT_CHARACTER = r"[^\0-\x1f\"\\]"
MAX_WHITESPACE = 32  # consecutive characters between JSON tokens: allows indentation, but no endless white space
_SEPARATORS = {"llama": "; "}  # between the calls of one answer; elsewhere a new line


def bounded_tag(text: str) -> str:
    """The tag with its `tool_calls` filled in, and MAX_WHITESPACE in each of its schemas.

    Raises ValueError, TypeError or KeyError for what is no structural tag.
    """
    tag = json.loads(text)
    if not isinstance(tag, dict):
        raise ValueError("a structural tag is an object")
    if "structures" in tag:  # the older form
        items = [StructuralTagItem.model_validate(item) for item in tag["structures"]]
        tag = StructuralTag.from_legacy_structural_tag(items, tag["triggers"]).model_dump(mode="json")
    return json.dumps(_filled(tag))


def schema_grammar(text: str, max_whitespace: int = MAX_WHITESPACE) -> xgrammar.Grammar:
    """max_whitespace: consecutive characters between the JSON tokens; 0: none, as in the shortest form."""
    if not isinstance(json.loads(text), (dict, bool)):
        raise ValueError("a JSON schema is an object or a boolean")
    if max_whitespace:
        grammar = xgrammar.Grammar.from_json_schema(text, max_whitespace_cnt=min(max_whitespace, MAX_WHITESPACE))
    else:
        grammar = xgrammar.Grammar.from_json_schema(text, any_whitespace=False, separators=(",", ":"))
    rules = str(grammar)
    if _LAX_CHARACTER in rules and "Regex(" not in rules:  # a Regex rule cannot be read back from its text
        grammar = xgrammar.Grammar.from_ebnf(rules.replace(_LAX_CHARACTER, _STRICT_CHARACTER))
    return grammar


def _filled(node: Any) -> Any:
    """Where formats stand; schemas and tools have parts of their own."""
    if isinstance(node, list):
        return [_filled(part) for part in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "json_schema" and "json_schema" in node:
        return _schema_part(node)
    if node.get("type") == "tool_calls":
        return _filled(tool_calls(node))
    return {name: _filled(value) for name, value in node.items()}


def _schema_part(node: dict[str, Any]) -> dict[str, Any]:
    given = node.get("max_whitespace_cnt")
    limit = min(given, MAX_WHITESPACE) if isinstance(given, int) else MAX_WHITESPACE
    if node.get("style", "json") != "json" or node.get("any_order") or node.get("excludes"):
        return {**node, "max_whitespace_cnt": max(limit, 1)}
    rules = str(schema_grammar(json.dumps(node["json_schema"]), limit))
    if limit == 0 or (_STRICT_CHARACTER in rules and "Regex(" not in rules):
        return {"type": "grammar", "grammar": rules}
    return {**node, "max_whitespace_cnt": limit}


def tool_calls(node: dict[str, Any]) -> dict[str, Any]:
    """{"model", "tools", "tool_choice": "auto" or "required", "parallel_tool_calls"} -> xgrammar's formats.

    Required calls come without text around them.
    """
    is_forced, is_one = node.get("tool_choice") == "required", node.get("parallel_tool_calls") is False
    tag = xgrammar.get_model_structural_tag(
        str(node.get("model")),
        tools=node.get("tools"),
        tool_choice="required" if is_forced else "auto",
        reasoning="disabled",  # what comes before the calls is said by the rest of the tag
        parallel_tool_calls=not is_one,
        max_whitespace_cnt=MAX_WHITESPACE,
    )
    form: dict[str, Any] = tag.model_dump(mode="json")["format"]
    if node.get("model") == "minimax" and form["type"] == "sequence":  # its template closes the reasoning first
        form = form["elements"][-1]
    if not is_forced:
        return form
    if form["type"] == "optional":
        form = form["content"]
    if form["type"] == "triggered_tags":
        separator = _SEPARATORS.get(str(node.get("model")), "\n")
        tags = {"tags": form["tags"], "separator": separator, "stop_after_first": form["stop_after_first"]}
        form = {"type": "tags_with_separator", **tags}
    return {**form, "at_least_one": True} if form["type"] == "tags_with_separator" else form
