"""Schemas, expressions and grammars that are too large on their face are refused before anything is compiled."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import pytest
from slipstream.core.config import StructuredOutputConfig
from slipstream.core.errors import RequestError
from slipstream.core.grammar_limits import check_grammar
from slipstream.core.sampling_params import Guide

LIMITS = StructuredOutputConfig()


def _nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def _older_tag(schema: str) -> str:
    """With the schema as a text."""
    return json.dumps({"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f>"]})


@pytest.mark.parametrize(
    ("guide", "parameter"),
    [
        (Guide("regex", "a" * 16385), "guided_max_regex_chars=16384"),
        (Guide("regex", "(" * 65 + "a" + ")" * 65), "guided_max_depth=64"),
        (Guide("regex", "a{10001}"), "guided_max_repeat=10000"),
        (Guide("regex", "a{1,99999999999999999999999}"), "guided_max_repeat=10000"),
        (Guide("ebnf_grammar", "root ::= " + '"a" ' * 450_000), "guided_max_grammar_bytes=65536"),
        (Guide("ebnf_grammar", "root ::= " + "(" * 65 + '"a"' + ")" * 65), "guided_max_depth=64"),
        (Guide("ebnf_grammar", 'root ::= "a"{2,10001}'), "guided_max_repeat=10000"),
        (Guide("json_schema", json.dumps({"description": "x" * 131072})), "guided_max_schema_bytes=131072"),
        (Guide("json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(1001)}})), "guided_max_properties"),
        (Guide("json_schema", json.dumps({"type": "string", "minLength": 10**6})), "guided_max_repeat=10000"),
        (Guide("json_schema", json.dumps({"type": "array", "minItems": 1e300})), "guided_max_repeat=10000"),
        (Guide("json_schema", json.dumps({"anyOf": [{"pattern": "a{10001}"}]})), "guided_max_repeat=10000"),
        (Guide("json_schema", _nested(65)), "guided_max_depth=64"),
        (Guide("structural_tag", _older_tag(_nested(65))), "guided_max_depth=64"),
        (Guide("structural_tag", _older_tag(_nested(10_000))), "guided_max_depth=64"),
        (Guide("structural_tag", _older_tag('{"type": "array", "minItems": 100000}')), "guided_max_repeat=10000"),
        (Guide("json_schema", _nested(10_000)), "guided_max_depth=64"),
        (Guide("json_schema", json.dumps({"type": "integer", "maximum": 2**64})), "maximum at /maximum.* 64 bits"),
        (Guide("json_schema", json.dumps({"type": "number", "minimum": -(10**309)})), "numbers up to 1e308"),
        (Guide("json_schema", json.dumps({"default": 10**400})), "numbers up to 1e308"),
        (Guide("json_schema", '{"type": "number", "maximum": 1e400}'), "numbers up to 1e308"),
        (Guide("json_schema", '{"type": "array", "minItems": -1e400}'), "numbers up to 1e308"),
    ],
    ids=lambda value: value.type if isinstance(value, Guide) else value.partition("=")[0],
)
def test_what_is_too_large_is_refused_by_name(guide: Guide, parameter: str) -> None:
    with pytest.raises(RequestError, match=parameter) as caught:
        check_grammar(guide, LIMITS)
    assert caught.value.field == "guided_decoding_guide"


@pytest.mark.parametrize(
    "guide",
    [
        Guide("json"),
        Guide("regex", r"\(\(" * 100 + r"[{99999}(]{3}"),
        Guide("regex", r"\{99999\}" + "|".join(["(choice)"] * 1000)),
        Guide("ebnf_grammar", 'root ::= "{99999}" [(({99999}] # ((((({99999}\n'),
        Guide("json_schema", "true"),
        Guide("json_schema", json.dumps({"properties": {"minLength": {"type": "string", "maxLength": 10000}}})),
        Guide("json_schema", _nested(64)),
    ],
    ids=lambda guide: guide.type,
)
def test_what_fits_passes(guide: Guide) -> None:
    check_grammar(guide, LIMITS)


def test_text_that_is_no_json_is_no_schema() -> None:
    for text in ("{not json", '{"minItems": NaN}', '{"maxLength": Infinity}'):
        with pytest.raises(RequestError, match="not a usable json_schema"):
            check_grammar(Guide("json_schema", text), LIMITS)
    with pytest.raises(RequestError, match="not a usable structural_tag"):
        check_grammar(Guide("structural_tag", _older_tag("{")), LIMITS)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "[" * 16_000),
        ("regex", "[" * 16_000 + "\\"),
        ("ebnf_grammar", "[" * 65_000),
        ("ebnf_grammar", '"' + '\\"' * 32_000),
        ("json_schema", json.dumps({"type": "string", "pattern": "[" * 120_000})),
        ("regex", "a{" + " " * 8000 + "," + " " * 8000),
        ("regex", "a{" + "1" * 8000 + "," + "1" * 8000),
        ("regex", "a{ " * 5000),
        ("ebnf_grammar", 'root ::= "a"{' + " " * 32_000 + "," + " " * 32_000),
        ("json_schema", json.dumps({"type": "string", "pattern": "a{" + " " * 60_000 + "," + " " * 60_000})),
    ],
    ids=lambda value: value[:20],
)
def test_brackets_that_are_not_closed_cost_no_more_than_others(kind: str, text: str) -> None:
    began = time.process_time()
    with suppress(RequestError):
        check_grammar(Guide(kind, text), LIMITS)
    assert time.process_time() - began < 1
