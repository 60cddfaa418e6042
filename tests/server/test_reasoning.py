"""Reasoning: told from the answer however it is split, ended by a budget, and no part of a grammar."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import openai
import pytest
import toy_tokenizers
from fake_triton import FakeTriton
from slipstream.core.sampling_params import Guide
from slipstream.server.model_tokenizer import ModelTokenizer
from slipstream.server.reasoning import ReasoningUse, ThinkParser, guide_behind, select_reasoning
from slipstream.server.tools.harmony import HarmonyParser
from slipstream.server.tools.json_call import CallArguments, CallStart, Content, Event, Reasoning
from slipstream.server.tools.parsers import HermesParser, ToolParser

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
HARMONY = (
    "<|channel|>analysis<|message|>Let me see.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
)


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content, calls."""
    thoughts = content = ""
    calls: list[tuple[str, str]] = []
    events: list[Event] = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    for event in events:
        if isinstance(event, Reasoning):
            thoughts += event.text
        elif isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallStart):
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return thoughts, content, calls


def splits(text: str) -> list[list[str]]:
    """The text whole, by character, and cut in two anywhere."""
    return [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nOne < two.\n</think>\n\nYes.", False, ("One < two.", "Yes.", [])),
        ("One </thin two.\n</think>\n\nYes. </think>", True, ("One </thin two.", "Yes. </think>", [])),
        ("No thoughts.", False, ("", "No thoughts.", [])),
        ("<thinking> is no mark", False, ("", "<thinking> is no mark", [])),
        ("Cut off", True, ("Cut off", "", [])),
        ("\n<think>\nBegun twice.</think>Yes.", True, ("Begun twice.", "Yes.", [])),
        ("<th", True, ("<th", "", [])),
        (" <thin ice</think>Yes.", True, ("<thin ice", "Yes.", [])),
        ("<think>Cut </thi", False, ("Cut </thi", "", [])),
        ("<think></think>Yes.", False, ("", "Yes.", [])),
        (f"Call.</think>\n{CALL}", True, ("Call.", "", [("f", '{"a": 1}')])),
        (f"<think>{CALL}</think>done", False, (CALL, "done", [])),
    ],
)
def test_text_between_marks_is_reasoning_however_it_is_split(text: str, is_open: bool, expected: tuple) -> None:
    for pieces in splits(text):
        assert read(ThinkParser(is_open, HermesParser), pieces) == expected, pieces
    if not expected[2]:
        assert read(ThinkParser(is_open, None), [text]) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HARMONY, ("Let me see.", "I look it up.", [("f", '{"a": 1}')])),
        (
            "<|channel|>analysis<|message|>So.<|end|><|start|>assistant to=functions.g"
            "<|channel|>commentary json<|message|>{}",
            ("So.", "", [("g", "{}")]),
        ),
        ("<|channel|>final<|message|>A <| b.", ("", "A <| b.", [])),
        ("<|channel|>analysis<|message|>cut", ("cut", "", [])),
        ('{"a": 1}', ("", '{"a": 1}', [])),
        (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", ("", "", [("f", "{}")])),
        (" to you", ("", " to you", [])),
    ],
)
def test_channels_are_told_apart_however_they_are_split(text: str, expected: tuple) -> None:
    for pieces in splits(text):
        assert read(HarmonyParser(), pieces) == expected, pieces


def test_the_format_is_read_off_the_template() -> None:
    assert [select_reasoning("auto", text) for text in ("x </think>", "<|channel|>", "plain")] == [
        "think",
        "harmony",
        "",
    ]
    assert [select_reasoning(name, "</think>") for name in ("none", "openai_gptoss", "qwen3")] == [
        "",
        "harmony",
        "think",
    ]


GUIDES = [
    ({"json": SCHEMA}, '{"a": 1}', '{"b": 1}'),
    ({"regex": "[0-9]+"}, "77", "x"),
    ({"choice": ["yes", "no"]}, "no", "maybe"),
    ({"grammar": 'root ::= "a" "b"'}, "ab", "b"),
    ({"json_object": True}, '{"z": []}', "[]"),
    (None, "anything", None),
]


@pytest.mark.parametrize(("guide", "good", "bad"), GUIDES)
@pytest.mark.parametrize("is_open", [True, False])
def test_a_grammar_begins_behind_the_reasoning(
    tmp_path: Path, guide: dict | None, good: str, bad: str | None, is_open: bool
) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    from slipstream.engine.grammar_compiler import GrammarCompiler

    tokenizer = toy_tokenizers.byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler(str(tmp_path / "tokenizer.json"), tokenizer.get_vocab_size(), [1])
    whole = guide_behind(ReasoningUse("think", is_open), guide, budget=1000)
    assert whole is not None
    compiled = compiler.compile(Guide("structural_tag", json.dumps(whole["structural_tag"])))

    def accepts(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return bool(matcher.accept_string(text)) and (not guide or "json" not in guide or matcher.is_completed())

    begin = "" if is_open else "<think>"
    assert accepts(f"{begin}any {{ text\n</think>\n\n{good}")
    assert bad is None or not accepts(f"{begin}any {{ text</think>{bad}")
    assert is_open or accepts(good)


def test_a_grammar_stays_what_it_is_where_nothing_is_thought() -> None:
    for use in (ReasoningUse(), ReasoningUse("think", is_closed=True)):
        assert guide_behind(use, {"regex": "x"}, None) == {"regex": "x"}
    assert guide_behind(ReasoningUse("think"), None, None) is None


def ask(client: openai.OpenAI, model: str, pieces: list[str], **options: object) -> object:
    messages = [{"role": "user", "content": json.dumps({"pieces": pieces})}]
    return client.chat.completions.create(model=model, messages=messages, **options)


PIECES = {
    "thinking": ["Let me ", "see.\n</thi", "nk>\n\nYes, ", "it is."],
    "pondering": ["<thi", "nk>\nLet me ", "see.\n</think>\n\n", "Yes, it is."],
    "harmony": [
        "<|channel|>ana",
        "lysis<|message|>Let me see.<|end|><|start|>assistant",
        "<|channel|>final<|message|>Yes, ",
        "it is.",
    ],
}


@pytest.mark.parametrize("model", PIECES)
def test_an_answer_has_its_reasoning_beside_it(fake_client: openai.OpenAI, model: str) -> None:
    message = ask(fake_client, model, PIECES[model]).choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me see.", "Yes, it is.")
    assert message.reasoning == message.reasoning_content, "vLLM's name"
    thoughts = content = ""
    for chunk in ask(fake_client, model, PIECES[model], stream=True):
        thoughts += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
        content += chunk.choices[0].delta.content or ""
    assert (thoughts, content) == ("Let me see.", "Yes, it is.")
    hidden = ask(fake_client, model, PIECES[model], extra_body={"include_reasoning": False}).choices[0].message
    assert (getattr(hidden, "reasoning_content", None), hidden.content) == (None, "Yes, it is.")


def test_usage_counts_the_reasoning(fake_client: openai.OpenAI) -> None:
    whole = ask(fake_client, "thinking", PIECES["thinking"]).usage
    assert whole.completion_tokens_details.reasoning_tokens == 1, "no more than all tokens"
    untold = ask(fake_client, "pondering", PIECES["pondering"]).usage
    assert untold.completion_tokens_details is None, "the gateway has no tokenizer of this model"
    options = {"include_usage": True}
    *_, last = ask(fake_client, "thinking", PIECES["thinking"], stream=True, stream_options=options)
    assert last.usage.completion_tokens_details.reasoning_tokens == 2, "two pieces of a token each"
    *_, last = ask(fake_client, "plain", ["x"], stream=True, stream_options=options)
    assert last.usage.completion_tokens_details is None


def test_responses_count_the_reasoning_as_chats_do(fake_client: openai.OpenAI) -> None:
    asked = {"model": "thinking", "input": json.dumps({"pieces": PIECES["thinking"]})}
    whole = fake_client.responses.create(**asked)
    assert whole.usage.output_tokens_details.reasoning_tokens == 1, "no more than all tokens"
    assert fake_client.responses.retrieve(whole.id).usage == whole.usage
    *_, last = fake_client.responses.create(**asked, stream=True)
    assert last.response.usage.output_tokens_details.reasoning_tokens == 2, "two pieces of a token each"


def test_reasoning_of_a_whole_answer_is_counted_by_its_text(tmp_path: Path) -> None:
    tokenizer = toy_tokenizers.byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    one = len(tokenizer.encode("Let me see.", add_special_tokens=False).ids)
    assert one > 3 and ModelTokenizer(tmp_path).count(["Let me see."] * 2) == 2 * one
    assert ModelTokenizer(tmp_path).is_there and not ModelTokenizer(tmp_path / "none").is_there


def test_a_cut_off_thought_leaves_no_content(fake_client: openai.OpenAI) -> None:
    message = ask(fake_client, "thinking", ["Let me see"]).choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me see", None)


def test_a_call_behind_the_reasoning(fake_client: openai.OpenAI) -> None:
    message = ask(fake_client, "thinking", ["I call.</think>", CALL], tools=TOOLS).choices[0].message
    assert (message.reasoning_content, message.tool_calls[0].function.name) == ("I call.", "f")
    message = ask(fake_client, "harmony", [HARMONY], tools=TOOLS).choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me see.", "I look it up.")
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1}


def test_thinking_can_be_switched_off(fake_client: openai.OpenAI, fake_triton: FakeTriton) -> None:
    body = {"chat_template_kwargs": {"enable_thinking": False}, "structured_outputs": {"regex": "x"}}
    message = ask(fake_client, "thinking", ["x"], extra_body=body).choices[0].message
    assert message.content == "x" and getattr(message, "reasoning_content", None) is None
    assert fake_triton.sampling[-1]["structured_outputs"] == {"regex": "x"}


def test_a_budget_and_a_format_become_one_grammar(fake_client: openai.OpenAI, fake_triton: FakeTriton) -> None:
    body = {"thinking_token_budget": 20}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    ask(fake_client, "thinking", ["</think>{}"], extra_body=body, response_format=form)
    tag = fake_triton.sampling[-1]["structured_outputs"]["structural_tag"]
    thoughts, end, _, answer = tag["format"]["elements"]
    assert (thoughts["max_tokens"], end["value"], answer["json_schema"]) == (20, "</think>", SCHEMA)
    for model, value in (("plain", 20), ("thinking", 0), ("thinking", 10**12)):
        with pytest.raises(openai.BadRequestError, match="thinking_token_budget"):
            ask(fake_client, model, ["x"], extra_body={"thinking_token_budget": value})


def test_other_apis_have_reasoning_in_their_own_form(fake_client: openai.OpenAI) -> None:
    prompt = json.dumps({"pieces": PIECES["thinking"]})
    answer = fake_client.responses.create(model="thinking", input=prompt)
    thoughts, message = answer.output
    assert (thoughts.type, thoughts.content[0].text) == ("reasoning", "Let me see.")
    assert message.content[0].text == "Yes, it is."
    kinds = [event.type for event in fake_client.responses.create(model="thinking", input=prompt, stream=True)]
    assert "response.reasoning_text.delta" in kinds and "response.reasoning_text.done" in kinds
    body = {"model": "thinking", "max_tokens": 64, "messages": [{"role": "user", "content": prompt}]}
    found = fake_client.post("/messages", body=body, cast_to=dict)
    assert [block["type"] for block in found["content"]] == ["thinking", "text"]
    assert found["content"][0]["thinking"] == "Let me see."
    assert len(list(itertools.islice(found["content"], 3))) == 2
