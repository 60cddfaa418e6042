"""Tool calls in text: the same events however the text is cut into pieces, and nothing lost when it is no call."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.server.reasoning import ThinkParser
from slipstream.server.tools.json_call import CallArguments, CallStart, Content, JsonCall, Reasoning
from slipstream.server.tools.lists import ListParser, MistralParser
from slipstream.server.tools.marked import may_be_text
from slipstream.server.tools.parsers import HermesParser, Llama3Parser, ToolParser
from slipstream.server.tools.select import FORMATS, select_format

A, B = {"a": [1, {"b": '}]" {'}], "c": "é\n"}, {}
A_TEXT, NAMES = json.dumps(A), {"f": {}, "g": {}}
_TYPES = {"n": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": "object"}, "m": {"type": ["null", "string"]}}
SCHEMAS = {"typed": {"type": "object", "properties": _TYPES}, "f": {}, "g": {}}
TYPED = {"n": 3, "s": "3", "o": {"k": [1]}, "m": "null", "x": True, "y": "two\nlines < & >"}
UNTYPED = TYPED | {"s": 3, "m": None}
_VALUES = {"n": "3", "s": "3", "o": '{"k": [1]}', "m": "null", "x": "true", "y": "two\nlines < & >"}
_PARAMETERS = "\n".join(f"<parameter={name}>\n{value}\n</parameter>" for name, value in _VALUES.items())
QWEN = f"""<tool_call>
<function=typed>
{_PARAMETERS}
</function>
</tool_call>
<tool_call>
<function=g>
</function>
</tool_call>"""
_PAIRS = "\n".join(f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>" for name, value in _VALUES.items())
GLM = f"<tool_call>typed\n{_PAIRS}\n</tool_call>"
_PARAMETERS = "\n".join(f'<parameter name="{name}">{value}</parameter>' for name, value in _VALUES.items())
MINIMAX = f'<invoke name="typed">\n{_PARAMETERS}\n</invoke>'
DS, SEP = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
DE = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
KB, KA, KE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KS = f"<|tool_calls_section_begin|>{KB}"


def of(name: str) -> Callable[[], ToolParser]:
    return lambda: FORMATS[name].make_parser(SCHEMAS)


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
    (
        ListParser,
        f'[ {{"name": "f", "arguments": {A_TEXT}}} , {{"name":"g","arguments":{{}}}}]',
        "",
        [("f", A), ("g", B)],
    ),
    (of("granite"), f'Well.<|tool_call|> [{{"name": "f", "arguments": {A_TEXT}}}]', "Well.", [("f", A)]),
    (of("granite"), "<|tool_call|> b", "<|tool_call|> b", []),
    (of("granite"), "Sum:<|tool_call|> [1, 2, [3, 4]], so", "Sum:<|tool_call|> [1, 2, [3, 4]], so", []),
    (of("granite"), '<|tool_call|>[{"a": [1, 2]}, 3]', '<|tool_call|>[{"a": [1, 2]}, 3]', []),
    (of("granite"), f'<|tool_call|>[{{"name": "f", "arguments": {A_TEXT}}}, 1, 2]', ", 1, 2]", [("f", A)]),
    (MistralParser, "So:[TOOL_CALLS] [1, 2, 3] end", "So:[TOOL_CALLS] [1, 2, 3] end", []),
    (MistralParser, f"[TOOL_CALLS][1, 2][TOOL_CALLS]f{A_TEXT}", "[TOOL_CALLS][1, 2]", [("f", A)]),
    (ListParser, "[1, 2, 3] and", "[1, 2, 3] and", []),
    (of("pythonic"), '<|python_start|>[{"a": 1}, 2]', '<|python_start|>[{"a": 1}, 2]', []),
    (of("phi4"), 'functools[{"name": "g", "arguments": {}}]', "", [("g", B)]),
    (of("phi4"), '<|tool_call|>[{"name": "g", "arguments": {}}]<|/tool_call|>', "", [("g", B)]),
    (of("deepseek_v3"), f"Hm.{DS}function{SEP}f\n```json\n{A_TEXT}\n```{DE}", "Hm.", [("f", A)]),
    (
        of("deepseek_v31"),
        f"{DS}f{SEP}{A_TEXT}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g{SEP}{{}}{DE}",
        "",
        [("f", A), ("g", B)],
    ),
    (of("deepseek_v31"), "<｜tool▁call▁begin｜> b", "<｜tool▁call▁begin｜> b", []),
    (of("kimi_k2"), f"{KS}functions.f:0{KA}{A_TEXT}{KE}{KB}functions.g:1{KA}{{}}{KE}", "", [("f", A), ("g", B)]),
    (of("qwen3_coder"), f"So.\n{QWEN}", "So.", [("typed", TYPED), ("g", B)]),
    (of("qwen3_coder"), "<tool_call> b > c", "<tool_call> b > c", []),
    (
        of("glm45"),
        f"{GLM}\n{GLM.replace('typed', 'other')}",
        "",
        [("typed", TYPED), ("other", UNTYPED)],
    ),
    (of("glm45"), "<tool_call>g</tool_call>", "", [("g", B)]),
    (of("minimax_m2"), f"<minimax:tool_call>\n{MINIMAX}\n</minimax:tool_call>", "", [("typed", TYPED)]),
    (of("pythonic"), "[f(a=[1, {'b': '}]\" {'}], c='é\\n'), g()]", "", [("f", A), ("g", B)]),
    (of("pythonic"), "<|python_start|>[x.y(a=-1.5, b=None)]<|python_end|>", "", [("x.y", {"a": -1.5, "b": None})]),
    (of("pythonic"), '[{"name": "g", "arguments": {}}]', "", [("g", B)]),
    (of("pythonic"), '[{"name": "g", "arguments": {}}]<|python_end|> and more', "", [("g", B)]),
    (of("pythonic"), "[1, 2] are numbers", "[1, 2] are numbers", []),
    (of("pythonic"), "[f(x)]", "[f(x)]", []),
    (of("pythonic"), "[x.y.z(), f(a=1)(b=2)]", "[x.y.z(), f(a=1)(b=2)]", []),
    (of("pythonic"), "[x.y.z(a=1)]", "", [("x.y.z", {"a": 1})]),
    (of("pythonic"), "[f(a=1", "[f(a=1", []),
    (of("pythonic"), "[f(a=__import__('os'))]", "[f(a=__import__('os'))]", []),
    (of("pythonic"), "plain", "plain", []),
    (
        of("harmony"),
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        "",
        [("f", {"a": 1})],
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
            assert isinstance(event, CallArguments) and not isinstance(event, Reasoning)
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


MARKS = """<tool_call> </tool_call> [TOOL_CALLS] {"name":"f" "arguments":{ } ] [ , \\ " <function=f> <parameter=a>
</parameter> <arg_key> </arg_value> <invoke name="f"> f(a= ) <|channel|> <|message|> to=functions.f <|call|>"""
PIECES_OF_CALLS = st.sampled_from([" ", "\n", *MARKS.split(), DS, SEP, DE, KB, KA, KE])


@pytest.mark.parametrize("make", [ListParser, *(of(name) for name in FORMATS)])
@given(text=st.lists(PIECES_OF_CALLS, max_size=12).map("".join))
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


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|channel|>analysis", "harmony"),
        ("<tool_call>\n<arg_key>", "glm45"),
        ("<tool_call>\n<function=", "qwen3_coder"),
        ("<tool_call>", "hermes"),
        ("<｜tool▁call▁begin｜>x<｜tool▁sep｜>\n```json", "deepseek_v3"),
        ("<｜tool▁call▁begin｜>x<｜tool▁sep｜>", "deepseek_v31"),
        ("Write ```json here", None),
        ("<|tool|>", "phi4"),
    ],
)
def test_a_format_is_read_off_the_template(template: str, name: str | None) -> None:
    form = select_format("auto", template)
    assert (form.name if form else None) == name
    assert select_format("none", template) is None


def test_values_keep_their_text_where_the_schema_names_strings() -> None:
    texts = [{"type": "string"}, {"enum": ["1"]}, {"const": "1"}, {"anyOf": [{"type": "null"}, {"type": "string"}]}]
    assert all(may_be_text(schema) for schema in texts)
    assert not any(may_be_text(schema) for schema in ({}, None, {"type": "integer"}, {"enum": [1]}, {"anyOf": 3}))


def test_a_long_value_costs_time_by_its_length_alone() -> None:
    parser = of("qwen3_coder")()
    parser.feed("<tool_call><function=f><parameter=a>")
    num_searched = 0
    for _ in range(20_000):
        before = parser._num_searched
        assert parser.feed("abcdefgh<") == []
        num_searched += len(parser._text) - before
    assert num_searched < 20_000 * 40
    assert parser.feed("/parameter></function></tool_call>")[-1] == CallArguments("}")


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "pythonic"])
def test_a_whole_answer_is_read_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark is one token, which a client may have a model repeat; a parser may copy all of its text at each."""
    sizes: list[int] = []
    kind = type(of(name)())
    method = "_next_mark" if name == "harmony" else "_step"
    step = getattr(kind, method)

    def measured(self: Any, *arguments: Any) -> Any:
        sizes.append(len(self._text))
        return step(self, *arguments)

    monkeypatch.setattr(kind, method, measured)
    call = '{"name": "f", "parameters": {}};'
    for mark in (call, "[TOOL_CALLS]", "<|tool_call_begin|>", KB, "<|channel|>", "<|start|>", "<tool_call>"):
        sizes.clear()
        of(name)().feed(mark * 10_000)
        assert max(sizes) < 10_000, mark


def test_arguments_are_read_by_strings_and_not_by_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, take = [], JsonCall._take
    monkeypatch.setattr(JsonCall, "_take", lambda self, char: (taken.append(char), take(self, char))[1])
    lines = {"path": "a.py", "text": 'print("x")\n\t' * 5000, "list": [1.5, "two"] * 5000}
    text = json.dumps({"name": "f", "arguments": lines})
    for pieces in ([text], [text[start : start + 7] for start in range(0, len(text), 7)]):
        call, events, taken[:] = JsonCall(), [], []
        for piece in pieces:
            events += call.feed(piece)[0]
        assert call.is_done and json.loads("".join(event.text for event in events[1:])) == lines
        assert len(taken) < len(text) / 4


_BEFORE = {
    "hermes": '<tool_call>{"name": "f", "arguments": {}}',
    "llama3": '{"name": "f", "parameters": {}}',
    "mistral": "[TOOL_CALLS]",
    "qwen3_coder": "<tool_call>\n<function=typed>",
    "glm45": "<tool_call>typed\n",
    "kimi_k2": KS + "functions.f:0" + KA,
    "deepseek_v31": f"{DS}f{SEP}{{}}",
    "minimax_m2": '<invoke name="typed">\n',
    "granite": "<|tool_call|>",
    "pythonic": "<|python_start|>",
}


@pytest.mark.parametrize("name", ["think", *FORMATS])
def test_white_space_without_end_costs_time_by_its_length_alone(name: str) -> None:
    """A token may be 128 spaces, and a model may repeat it until its answer is full."""
    for before in ("", _BEFORE.get(name, "")):
        parser = ThinkParser(False, None) if name == "think" else of(name)()
        events, start = parser.feed(before), time.process_time()
        for _ in range(16_000):
            events += parser.feed(" " * 128)
        assert time.process_time() - start < 1.5, "3 to 50 s, where all of it is looked at again"
        events += [*parser.feed("x"), *parser.finish()]
        assert all(isinstance(event, (Content, CallStart, CallArguments)) for event in events)


def test_white_space_before_the_end_of_a_call_costs_little_and_holds_back_nothing() -> None:
    """All of it was looked at again with each space; and what followed the call was kept as if it were a long value."""
    parser = of("qwen3_coder")()
    parser.feed("<tool_call><function=f></function>")
    start = time.process_time()
    for _ in range(70_000):
        assert parser.feed(" ") == []
    assert time.process_time() - start < 1.5, "15 s, where all of it is looked at again"
    assert parser.feed("</tool_call>") == [CallArguments("{}")]
    assert [parser.feed(f"word{number}") for number in range(3)] == [[Content(f"word{number}")] for number in range(3)]


_LONG_TEXT = {
    **{name: before for name, before in _BEFORE.items() if name in ("qwen3_coder", "glm45", "minimax_m2")},
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": "',
    "hermes, as a string": '<tool_call>{"name": "f", "arguments": "',
    "hermes, the name behind": '<tool_call>{"arguments": {"a": "',
    "hermes, another key": '<tool_call>{"a": "',
    "llama3": '{"name": "f"',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": "',
    "kimi_k2": KS + "functions.f:0" + KA + '{"a": "',
    "granite": "<|tool_call|>[",
}
_VALUES_OF = {"qwen3_coder": "<parameter=y>", "glm45": "<arg_key>y</arg_key><arg_value>"}
_VALUES_OF["minimax_m2"] = '<parameter name="y">'


@pytest.mark.parametrize("case", _LONG_TEXT)
def test_a_long_text_costs_time_by_its_length_alone(case: str) -> None:
    """Adding each of its tokens to a text copies the text: 131,072 tokens of 80 characters took minutes."""
    parser, text = of(case.partition(",")[0])(), {"granite": "," * 80, "llama3": " " * 20}.get(case, "x" * 80)
    events, start = parser.feed(_LONG_TEXT[case] + _VALUES_OF.get(case, "")), time.process_time()
    for _ in range(100_000):
        events += parser.feed(text)
    assert time.process_time() - start < 3.0, "10 to 150 s, where all of it is copied with each"
    parser.finish()


@pytest.mark.parametrize("name", _VALUES_OF)
@pytest.mark.parametrize("size", [1, 5, 100])
def test_a_long_parameter_ends_where_it_ends(name: str, size: int) -> None:
    """Its end may come in pieces, and be followed by another parameter."""
    value, form = "y<y>\n" * 30_000 + "y", {"qwen3_coder": QWEN, "glm45": GLM, "minimax_m2": MINIMAX}[name]
    text = form.replace("two\nlines < & >", value)
    parser, events = of(name)(), []
    for start in range(0, len(text), size):
        events += parser.feed(text[start : start + size])
    events += parser.finish()
    begun = [place for place, event in enumerate(events) if isinstance(event, CallStart)]
    ends = [*begun[1:], len(events)]
    written = "".join(event.text for event in events[begun[0] : ends[0]] if isinstance(event, CallArguments))
    assert json.loads(written) == TYPED | {"y": value}
