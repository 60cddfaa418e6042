"""The schemas and expressions within a structural tag, checked like those that stand alone. Any thread; standard
library only. Its depth is limited before (core/grammar_limits.py).
"""

from __future__ import annotations

import json

from slipstream.core.regex_syntax import UnenforcedError, check_regex
from slipstream.core.schema_keywords import check_schema


def check_tag(tag: object) -> None:
    """tag: as parsed from JSON, its schemas too, with xgrammar's formats and `tool_calls` (engine/structural_tags.py).

    Raises UnenforcedError. JSON pointers begin at the schema that they are of.
    """
    level = [tag]
    while level:
        below: list[object] = []
        for node in level:
            if isinstance(node, list):
                below += node
            elif isinstance(node, dict) and not _check_format(node):
                below += node.values()
        level = below


def _check_format(node: dict[str, object]) -> bool:
    """Returns whether it is one that holds no other formats."""
    kind, pattern = node.get("type"), node.get("pattern")
    if "json_schema" in node and kind in ("json_schema", "qwen_xml_parameter"):
        check_schema(node["json_schema"])
    elif kind == "regex" and isinstance(pattern, str):
        check_regex(pattern, is_in_json=False)
    elif kind == "tool_calls":
        _check_tools(node)
    elif "schema" in node and "begin" in node:  # of the older form
        check_schema(node["schema"])
    else:
        return False
    return True


def _check_tools(node: dict[str, object]) -> None:
    """A tool that the model may call or not is held to its schema where that can be, unless it is strict."""
    is_forced, tools = node.get("tool_choice") == "required", node.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            continue
        strict = function.get("strict")
        if strict is True or (is_forced and strict is not False):
            try:
                check_schema(function.get("parameters"))
            except UnenforcedError as error:
                name = json.dumps(str(function.get("name"))[:60])
                raise UnenforcedError(f"{error}; in the parameters of tool {name}, or strict: false") from error
