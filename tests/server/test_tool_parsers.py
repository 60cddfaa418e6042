"""Tool calls in text: the same events however the text is cut into pieces, and nothing lost when it is no call."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.server.tools.json_call import CallArguments, CallStart, Content
from slipstream.server.tools.parsers import (
    HermesParser,
    Llama3Parser,
    MistralParser,
    NamedParser,
    RequiredParser,
    ToolParser,
)

A, B = {"a": [1, {"b": '}]" {'}], "c": "é\n"}, {}
A_TEXT, NAMES = json.dumps(A), ("f", "g")

# (parser, what the model writes, content, calls)
CASES: list[tuple[Callable[[], ToolParser], str, str, list[tuple[str, object]]]] = [
    (HermesParser, "just text with <tool and < signs", "just text with <tool and < signs", []),
    (HermesParser, f'<tool_call>\n{{"name": "f", "arguments": {A_TEXT}}}\n</tool_call>', "", [("f", A)]),
    (HermesParser, 'Hm.\n<tool_call>{"arguments": {}, "name": "g"}</tool_call>', "Hm.", [("g", B)]),
    (
        HermesParser,
        f'<tool_call>{{"name": "f", "arguments": {A_TEXT}}}</tool_call>\n<tool_call>{{"name": "g"}}</tool_call>',
        "",
        [("f", A), ("g", B)],
    ),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", {"x": 1})]),
    (HermesParser, "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
    (HermesParser, '<tool_call>{"title": "x"}</tool_call>', '<tool_call>{"title": "x"}</tool_call>', []),
    (lambda: Llama3Parser(NAMES), f'{{"name": "f", "parameters": {A_TEXT}}}', "", [("f", A)]),
    (
        lambda: Llama3Parser(NAMES),
        f'<|python_tag|>{{"type": "function", "name": "f", "parameters": {A_TEXT}}}; {{"name": "g"}}',
        "",
        [("f", A), ("g", B)],
    ),
    (lambda: Llama3Parser(NAMES), '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
    (lambda: Llama3Parser(NAMES), '{"answer": [1, 2]} is it', '{"answer": [1, 2]} is it', []),
    (lambda: Llama3Parser(NAMES), "  no call", "  no call", []),
    (MistralParser, f'[TOOL_CALLS][{{"name": "f", "arguments": {A_TEXT}}}, {{"name": "g"}}]', "", [("f", A), ("g", B)]),
    (MistralParser, f"So:[TOOL_CALLS]f[ARGS]{A_TEXT}[TOOL_CALLS]g[ARGS]{{}}", "So:", [("f", A), ("g", B)]),
    (MistralParser, f"[TOOL_CALLS]f{A_TEXT}", "", [("f", A)]),
    (MistralParser, f"[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{A_TEXT}", "", [("f", A)]),
    (MistralParser, "[TOOL_CALLS]f[CALL_ID]abc123def{}[TOOL_CALLS]g[ARGS]{}", "", [("f", B), ("g", B)]),
    (MistralParser, "[TOOL] [1, 2]", "[TOOL] [1, 2]", []),
    (lambda: NamedParser("f"), A_TEXT, "", [("f", A)]),
    (
        RequiredParser,
        f'[ {{"name": "f", "arguments": {A_TEXT}}} , {{"name":"g","arguments":{{}}}}]',
        "",
        [("f", A), ("g", B)],
    ),
]


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, object]]]:
    content, calls = "", []
    for event in [*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()]:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallStart):
            calls.append([event.name, ""])
        else:
            assert isinstance(event, CallArguments)
            calls[-1][1] += event.text
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_whole_and_by_character(case: int) -> None:
    make, text, content, calls = CASES[case]
    assert read(make(), [text]) == (content, calls)
    assert read(make(), list(text)) == (content, calls)


@given(st.integers(0, len(CASES) - 1), st.lists(st.integers(0, 500), max_size=12))
def test_any_cut(case: int, places: list[int]) -> None:
    make, text, content, calls = CASES[case]
    assert read(make(), cut(text, places)) == (content, calls)


@pytest.mark.parametrize("make", [HermesParser, MistralParser, lambda: Llama3Parser(NAMES), RequiredParser])
@given(text=st.text(alphabet='<>tool_call/[]TOOL_CALLS{}"namefrgust:, \n\\', max_size=80))
def test_no_text_breaks_a_parser(make: Callable[[], ToolParser], text: str) -> None:
    for pieces in ([text], list(text)):
        parser = make()
        for piece in pieces:
            parser.feed(piece)
        parser.finish()


def test_the_id_of_the_model_is_kept() -> None:
    text = "[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}[TOOL_CALLS]g [CALL_ID] 9 [ARGS] {}[TOOL_CALLS]f[ARGS]{}"
    starts = [event for event in MistralParser().feed(text) if isinstance(event, CallStart)]
    assert starts == [CallStart("f", "abc123def"), CallStart("g", "9"), CallStart("f")]


def test_arguments_leave_before_the_call_is_whole() -> None:
    parser = HermesParser()
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a": ') == [CallStart("f"), CallArguments('{"a": ')]
    assert parser.feed("1") == [CallArguments("1")]
    assert parser.finish() == [], "cut off by the length: what there is was sent"
