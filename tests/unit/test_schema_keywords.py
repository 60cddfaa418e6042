"""What a grammar would not hold the answer to is refused with its place; what passes is enforced by xgrammar."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import xgrammar
from pydantic import BaseModel
from schema_cases import ACCEPTED, INT, MODELS, REFUSED, REFUSED_PATTERNS, REFUSED_REGEXES, having, under
from slipstream.core.config import StructuredOutputConfig
from slipstream.core.errors import RequestError
from slipstream.core.grammar_limits import check_grammar
from slipstream.core.regex_syntax import UnenforcedError
from slipstream.core.sampling_params import Guide
from slipstream.core.schema_keywords import DEFINITIONS, FORMATS, SELECTORS, TYPED
from slipstream.core.schema_keywords import REFUSED as REFUSED_KEYWORDS
from slipstream.core.schema_relaxing import MOST_CHARS, MOST_DROPPED, enforceable
from slipstream.engine.structural_tags import bounded_tag, schema_grammar
from slipstream.server.schemas import Tool
from slipstream.server.tools.calls_grammar import ListForm, calls_guide

LIMITS = StructuredOutputConfig()
INFO = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)], stop_token_ids=[0])
UNENFORCED = {"type": "object", "properties": {"a": {"type": "array", "items": INT, "uniqueItems": True}}}
UNIQUE = "/properties/a/uniqueItems"


def refusal(kind: str, text: str) -> str:
    """Empty if it passes."""
    try:
        check_grammar(Guide(kind, text), LIMITS)
    except RequestError as error:
        assert error.field == "guided_decoding_guide"
        return str(error)
    return ""


def accepts(grammar: xgrammar.Grammar, text: str) -> bool:
    compiled = xgrammar.GrammarCompiler(INFO, max_threads=1, cache_enabled=False).compile_grammar(grammar)
    matcher = xgrammar.GrammarMatcher(compiled)
    return bool(matcher.accept_string(text)) and matcher.is_completed()


@pytest.mark.parametrize(("schema", "pointer", "broken"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_is_dropped_is_refused_with_its_place(schema: dict[str, Any], pointer: str, broken: str) -> None:
    text = json.dumps(schema)
    told = refusal("json_schema", text)
    keyword = "patternProperties" if "^(?!n)" in pointer else pointer.rpartition("/")[2]
    assert f"has {keyword} at {pointer}" in told and "accepted: " in told
    assert accepts(schema_grammar(text), broken), "the grammar holds the answer to it: let it pass"


@pytest.mark.parametrize(("schema", "pointer", "broken"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_enforced_is_left_to_the_model_where_a_client_asks_for_that(
    schema: dict[str, Any], pointer: str, broken: str
) -> None:
    before = json.dumps(schema)
    if "nullable" in before:
        with pytest.raises(UnenforcedError, match="nullable"):
            enforceable(schema)
        return
    left = enforceable(schema)
    assert refusal("json_schema", json.dumps(left)) == "" and json.dumps(schema) == before
    is_left = pointer != "/properties"  # these are enforced, and anyOf beside them is left
    assert accepts(schema_grammar(json.dumps(left)), broken) == is_left


def test_the_rest_of_a_relaxed_schema_is_enforced() -> None:
    url = {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083}
    tags = {"type": "array", "items": {"type": "string", "pattern": "(?=a)b"}, "uniqueItems": True}
    left = enforceable(under("url", url, patternProperties={"(?=x)y": INT}) | {"title": "T"})
    assert left["properties"]["url"] == {"type": "string", "format": "uri", "minLength": 1}
    assert "patternProperties" not in left and left["additionalProperties"] is True and left["required"] == ["url"]
    assert enforceable(tags) == {"type": "array", "items": {"type": "string"}}
    assert enforceable(having("a")) == having("a")
    with pytest.raises(UnenforcedError):
        enforceable({"properties": {f"p{index}": tags for index in range(MOST_DROPPED)}, "type": "object"})


@pytest.mark.parametrize(
    "more",
    [
        {"if": {"required": ["a"]}, "then": {"properties": {"b": INT}, "required": ["b"]}},
        {"required": ["a", "b"]},
        {"anyOf": [having("b"), having("c")]},
        {"type": "object", "$ref": "#/$defs/B", "$defs": {"B": having("b")}},
        {"dependentSchemas": {"a": having("b")}, "unevaluatedProperties": False},
        {"dependentSchemas": {"a": having("b")}, "additionalProperties": INT},
    ],
)
def test_a_relaxed_schema_forbids_nothing_that_the_schema_allows(more: dict[str, Any]) -> None:
    """Objects have no other properties than those that are named, and what is left out may name some."""
    left = enforceable({"properties": {"a": INT}, **more})
    assert refusal("json_schema", json.dumps(left)) == ""
    assert accepts(schema_grammar(json.dumps(left)), '{"a": 1, "b": 2}')
    assert not accepts(schema_grammar(json.dumps(left)), '{"a": "x"}')


@pytest.mark.parametrize("names", [["x", "a"], ["a", "x", "y"], ["a", 3, "x"]], ids=str)
def test_of_required_names_those_that_are_properties_are_kept(names: list[object]) -> None:
    """One that is none dropped them all, so that tools were called without the arguments that they need."""
    left = enforceable({"type": "object", "properties": {"a": INT, "b": INT}, "required": names})
    assert left["required"] == ["a"]
    grammar = schema_grammar(json.dumps(left))
    assert all(accepts(grammar, text) for text in ('{"a": 1}', '{"a": 1, "b": 2}', '{"a": 1, "x": "any"}'))
    assert not any(accepts(grammar, text) for text in ("{}", '{"b": 2}', '{"x": 1}'))


def test_relaxing_is_bounded() -> None:
    assert enforceable({"type": "integer", "k" * 70: 1, "a~/b": 1}) == {"type": "integer"}
    assert enforceable({"enum": ["x" * (MOST_CHARS - 40)], "not": 1}).keys() == {"enum"}
    with pytest.raises(UnenforcedError, match=f"at most {MOST_CHARS}"):
        enforceable({"enum": ["x" * MOST_CHARS]})


@pytest.mark.parametrize(("pattern", "broken"), REFUSED_PATTERNS)
def test_patterns_of_which_a_part_is_dropped_are_refused(pattern: str, broken: str) -> None:
    text = json.dumps({"type": "string", "pattern": pattern})
    told = refusal("json_schema", text)
    assert "has pattern at /pattern with " in told and " at character " in told and "accepted: " in told
    assert accepts(schema_grammar(text), broken), "the grammar holds the answer to it: let it pass"


@pytest.mark.parametrize(("regex", "broken"), REFUSED_REGEXES)
def test_expressions_of_which_a_part_is_dropped_are_refused(regex: str, broken: str) -> None:
    told = refusal("regex", regex)
    assert " at character " in told and "accepted: " in told
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": regex}}
    assert refusal("structural_tag", json.dumps(tag)) == told
    if broken:
        assert accepts(xgrammar.Grammar.from_regex(regex), broken), "the grammar holds the answer to it: let it pass"
    else:
        with pytest.raises(RuntimeError):
            xgrammar.Grammar.from_regex(regex)


@pytest.mark.parametrize(("schema", "kept", "broken"), ACCEPTED, ids=lambda value: str(value)[:60])
def test_what_passes_is_enforced(schema: dict[str, Any], kept: str, broken: str) -> None:
    text = json.dumps(schema)
    assert refusal("json_schema", text) == ""
    grammar = schema_grammar(text)
    assert accepts(grammar, kept) and not accepts(grammar, broken)


@pytest.mark.parametrize(
    ("regex", "kept", "broken"),
    [
        ("^[a-z]{2,3}$", "ab", "a"),
        ("^a|b$", "b", "ab"),
        ("(^a$|^b$)", "a", "c"),
        (r"(?<x>\d+)(-\w*)?", "12-a", "-"),
        (r"[^\]a-]+\.[a^]", "bc.^", "a.^"),
        (r"\(\$\^\)\x41\u00e9\n", "($^)Aé\n", "A"),
        (r"(a\.b)|(c\ d)", "c d", "axb"),
    ],
)
def test_plain_expressions_pass(regex: str, kept: str, broken: str) -> None:
    assert refusal("regex", regex) == ""
    grammar = xgrammar.Grammar.from_regex(regex)
    assert accepts(grammar, kept) and not accepts(grammar, broken)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_models_of_pydantic_pass(model: type[BaseModel]) -> None:
    text = json.dumps(model.model_json_schema())
    assert refusal("json_schema", text) == ""
    schema_grammar(text)


def test_every_annotation_passes() -> None:
    for name in ("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly"):
        assert refusal("json_schema", json.dumps({"anyOf": [INT], name: "x", "x-own": 1})) == ""


def test_schemas_within_a_tag_are_checked() -> None:
    part = {"type": "json_schema", "json_schema": UNENFORCED}
    tag = {"type": "tag", "begin": "<a>", "content": part, "end": "</a>"}
    calls = {"type": "triggered_tags", "triggers": ["<a>"], "tags": [tag]}
    older = {"structures": [{"begin": "<a>", "schema": UNENFORCED, "end": "</a>"}], "triggers": ["<a>"]}
    as_text = {"structures": [{"begin": "<a>", "schema": json.dumps(UNENFORCED), "end": "</a>"}], "triggers": ["<a>"]}
    for given in ({"format": part}, {"format": {"type": "sequence", "elements": [calls]}}, older, as_text):
        assert UNIQUE in refusal("structural_tag", json.dumps({"type": "structural_tag", **given}))


def tool(strict: bool | None, parameters: dict[str, Any] = UNENFORCED, name: str = "f") -> Tool:
    function = {"name": name, "parameters": parameters, "strict": strict}
    return Tool.model_validate({"type": "function", "function": function})


@pytest.mark.parametrize("form", ["qwen_3", "llama", ListForm("[TOOL_CALLS]")], ids=str)
def test_a_tool_fails_a_request_only_where_its_schema_is_promised(form: str | ListForm) -> None:
    strict = tool(True, {"type": "object", "properties": {"n": INT}}, "g")
    cases = [(True, None, True), (True, True, True), (True, False, False)]
    cases += [(False, None, False), (False, True, True), (False, False, False)]
    for is_forced, of_tool, is_refused in cases:
        guide = calls_guide(form, [tool(of_tool), strict], is_forced, is_one=False)["structural_tag"]
        told = refusal("structural_tag", json.dumps(guide))
        assert (UNIQUE in told) is is_refused, (is_forced, of_tool, told)
        if not is_refused:
            xgrammar.Grammar.from_structural_tag(bounded_tag(json.dumps(guide)))


def test_the_page_names_every_keyword() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "gateway.md").read_text()
    section = page.partition("## Schemas and expressions")[2].partition("\n## ")[0]
    named = {word for text in re.findall(r"`([^`]*)`", section) for word in re.findall(r"[$\w-]+", text)}
    assert not {*TYPED, *FORMATS, *SELECTORS, *REFUSED_KEYWORDS, *DEFINITIONS} - named


def test_the_check_is_linear_and_its_messages_are_short() -> None:
    deep: dict[str, Any] = {"x-end": 1, "y": 1}
    for _ in range(20):
        deep = {"properties": {"k" * 1000: deep}}
    assert len(refusal("json_schema", json.dumps(deep))) < 600
    many = {"type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/A"} for i in range(999)}}
    references = {
        "anyOf": [{"$ref": "#/$defs/A"}] * 2800,
        "$defs": {"A": {"enum": list(range(5000))}},
        "type": "integer",
    }
    hostile = [
        json.dumps({**many, "required": list(many["properties"]), "$defs": {"A": INT}}),
        json.dumps({"$ref": "#" + "/a" * 60_000}),
        json.dumps(references),
        json.dumps({"type": "object", "patternProperties": {"^" + "a" * i: {} for i in range(400)}}),
        json.dumps({"type": "string", "pattern": "(" * 60 + "[" * 60_000}),
        json.dumps({"enum": [{}] * 30_000, "const": {}}),
    ]
    began = time.process_time()
    for text in hostile:
        assert len(text) < LIMITS.max_schema_bytes
        refusal("json_schema", text)
    for text in ("^" * 16_000, "$" * 16_000, "a$|" * 5_000, "[" * 16_000, "(?" * 30 + "\\" * 15_000):
        refusal("regex", text)
    assert time.process_time() - began < 3


@pytest.mark.parametrize(
    "schema",
    [
        *({"type": 3}, {"enum": 3}, {"anyOf": {}}, {"properties": 3}, {"required": 3}, {"type": ["integer", []]}),
        *({"type": "string", "pattern": 3}, {"type": "string", "format": []}, {"$ref": {}}, {"type": {}, "enum": [1]}),
        *({"type": "integer", "multipleOf": "x"}, {"type": "object", "patternProperties": 3, "required": [[]]}),
        *(3, [], True),
    ],
    ids=str,
)
def test_what_is_no_schema_is_no_error_of_ours(schema: object) -> None:
    refusal("json_schema", json.dumps(schema))
