"""Structural tags: calls in a model's own form, reasoning that ends, schemas as strict as without the tag."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import toy_tokenizers
import xgrammar
from engine_driver import Told, make_engine, run_steps
from slipstream.core.config import SpeculationConfig
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import Guide, SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.grammar_compiler import GrammarCompiler, GrammarError
from slipstream.engine.structural_tags import bounded_tag
from slipstream.server.reasoning import ReasoningUse, guide_behind
from slipstream.server.schemas import ChatRequest
from slipstream.server.tools.json_call import CallArguments, CallStart, Event
from slipstream.server.tools.select import FORMATS, ToolUse, plan_tools

PROMPT = [70, 201, 33]
PARAMETERS = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS, "strict": True}} for name in ("f", "g")
]
NAMED = {"type": "function", "function": {"name": "g"}}
PARAMS = SamplingParams(max_tokens=400, temperature=1.0)


def texts(engine: Engine, guide: dict, num_requests: int = 2, max_tokens: int = 400) -> list[str]:
    """The texts of answers that ended by themselves."""
    told: dict[Request, Told] = {}
    of_engine = Guide("structural_tag", json.dumps(guide["structural_tag"]))
    for seed in range(num_requests):
        params = replace(PARAMS, max_tokens=max_tokens, seed=seed, guide=of_engine)
        engine.submit(Request(list(PROMPT), params, handle=seed))
    run_steps(engine, told)
    assert engine.error is None and all(not one.error for one in told.values()), told
    ended = [one for one in told.values() if one.finish_reason is FinishReason.STOP]
    return [engine.tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in ended]


def plan(form: str, choice: object, is_parallel: bool | None = None) -> ToolUse:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": choice}
    request = ChatRequest.model_validate({**body, "parallel_tool_calls": is_parallel})
    return plan_tools(request, FORMATS.get(form))


def calls_of(use: ToolUse, text: str) -> list[tuple[str, dict]]:
    assert use.make_parser is not None
    parser = use.make_parser()
    events: list[Event] = [*parser.feed(text), *parser.finish()]
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append([event.name, ""])
        else:
            assert isinstance(event, CallArguments), (text, event)
            calls[-1][1] += event.text
    return [(name, json.loads(arguments)) for name, arguments in calls]


def matcher_of(tag: dict) -> xgrammar.GrammarMatcher:
    grammar = xgrammar.Grammar.from_structural_tag(bounded_tag(json.dumps(tag)))
    info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)], stop_token_ids=[0])
    return xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info, max_threads=1).compile_grammar(grammar))


def accepts(tag: dict, text: str) -> bool:
    matcher = matcher_of(tag)
    return bool(matcher.accept_string(text)) and matcher.is_completed()


def walk(tag: dict, seed: int) -> str:
    """A text of the grammar, each byte drawn from those that may follow; it ends where it can."""
    matcher, draw, text = matcher_of(tag), random.Random(seed), b""
    mask = xgrammar.allocate_token_bitmask(1, 256)
    while not matcher.is_completed():
        matcher.fill_next_token_bitmask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8)[0], bitorder="little"))
        bytes_left = [int(byte) for byte in allowed if byte not in b"\0 \t\r\n"] or [int(allowed[0])]
        text += bytes([draw.choice(bytes_left)])
        assert matcher.accept_token(text[-1]) and len(text) < 2000
    return text.decode()


@pytest.mark.parametrize("form", [*FORMATS, "without a format"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls_are_in_the_models_own_form(form: str, choice: object) -> None:
    use = plan(form, choice, is_parallel=False)
    assert use.guide is not None
    for seed in range(3):
        text = walk(use.guide["structural_tag"], seed)
        [(name, arguments)] = calls_of(use, text)
        assert name in ({"g"} if choice == NAMED else {"f", "g"})
        assert set(arguments) == {"n", "kind"} and arguments["kind"] in ("cat", "dog"), text
        assert isinstance(arguments["n"], int) and 0 <= arguments["n"] <= 99


def test_the_engine_forces_a_call(engine: Engine) -> None:
    use = plan("hermes", NAMED)
    assert use.guide is not None
    for text in texts(engine, use.guide, num_requests=4):
        assert [name for name, _ in calls_of(use, text)] == ["g"]


def test_a_choice_left_to_the_model_has_a_grammar_for_strict_tools_alone() -> None:
    lax = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
    request = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": lax}
    assert plan_tools(ChatRequest.model_validate(request), FORMATS["hermes"]).guide is None
    assert plan("pythonic", "auto").guide is None, "its calls have no grammar that keeps text possible"
    for form in ("hermes", "mistral", "glm45"):
        guide = plan(form, "auto").guide
        assert (guide is not None and "auto" in json.dumps(guide)) or "triggered_tags" in json.dumps(guide)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", 'Hm. <tool_call>\n{"name": "f", "arguments": {"n": 1, "kind": "cat"}}\n</tool_call>'),
        ("mistral", 'Hm. [TOOL_CALLS][{"name": "f", "arguments": {"n": 1, "kind": "cat"}}]'),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {"n": 1, "kind": "cat"}}]'),
    ],
)
def test_strict_tools_leave_text_free_and_arguments_right(form: str, text: str) -> None:
    guide = plan(form, "auto").guide
    assert guide is not None
    tag = guide["structural_tag"]
    assert accepts(tag, text) and accepts(tag, "No call.")
    assert not accepts(tag, text.replace('"cat"', '"cow"'))


@pytest.mark.parametrize(
    ("form", "call", "between"),
    [
        ("mistral", '{"name": "f", "arguments": {"n": 1, "kind": "cat"}}', ", "),
        ("llama3", '{"name": "f", "parameters": {"n": 1, "kind": "cat"}}', "; "),
        ("glm45", "<tool_call>f<arg_key>n</arg_key><arg_value>1</arg_value>"
         "<arg_key>kind</arg_key><arg_value>cat</arg_value></tool_call>", "\n"),
    ],
)  # fmt: skip
def test_required_calls_may_be_several_and_nothing_else(form: str, call: str, between: str) -> None:
    def written(*calls: str) -> str:
        return f"[TOOL_CALLS][{between.join(calls)}]" if form == "mistral" else between.join(calls)

    for is_parallel in (None, False):
        guide = plan(form, "required", is_parallel).guide
        assert guide is not None
        tag = guide["structural_tag"]
        assert accepts(tag, written(call))
        assert accepts(tag, written(call, call)) is (is_parallel is None)
        assert not accepts(tag, "Well. " + written(call)) and not accepts(tag, written(call) + " Well.")
    assert not accepts(tag, "")


def test_the_older_form_of_a_tag() -> None:
    structure = {"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}
    tag = {"type": "structural_tag", "structures": [structure], "triggers": ["<a>"]}
    assert accepts(tag, "x <a>3</a> y") and not accepts(tag, "x <a>z</a>")


def test_schemas_within_a_tag_are_as_strict_as_by_themselves() -> None:
    tag = {
        "type": "structural_tag",
        "format": {"type": "json_schema", "json_schema": {"type": "string", "minLength": 2}},
    }
    assert accepts(tag, '"ab"') and not accepts(tag, '"a\tb"')
    tag["format"] = {"type": "json_schema", "json_schema": {"type": "array", "items": {"type": "integer"}}}
    assert accepts(tag, "[1," + " " * 32 + "2]") and not accepts(tag, "[1," + " " * 33 + "2]")
    tag["format"]["max_whitespace_cnt"] = 0
    assert accepts(tag, "[1,2]") and not accepts(tag, "[1, 2]")


@pytest.mark.parametrize(
    "tag",
    [
        [],
        {"format": {"type": "made up"}},
        {"format": {"type": "tool_calls", "model": "made up", "tools": []}},
        {"format": {"type": "tool_calls", "model": "qwen_3", "tools": [], "tool_choice": "required"}},
        {"format": {"type": "tool_calls", "model": "qwen_3", "tools": [{"function": {"name": "f", "parameters": -1}}]}},
        {"format": {"type": "tool_calls", "model": "minimax", "tools": 7}},
        {"structures": 5, "triggers": None},
        {"format": {"type": "any_text", "excludes": 3}},
        {"format": {"type": "json_schema", "json_schema": {"type": "nonsense"}}},
    ],
    ids=str,
)
def test_what_is_no_tag_is_refused(tmp_path: Path, tag: object) -> None:
    tokenizer = toy_tokenizers.byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler(str(tmp_path / "tokenizer.json"), tokenizer.get_vocab_size(), [1])
    with pytest.raises(GrammarError):
        compiler.compile(Guide("structural_tag", json.dumps(tag)))


REASONING = [
    (ReasoningUse("think", is_open=True), "", "</think>"),
    (ReasoningUse("harmony"), "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
]


@pytest.mark.parametrize(("use", "begin", "end"), REASONING)
@pytest.mark.parametrize("method", [None, "ngram"])
def test_reasoning_ends_when_its_budget_is_spent(
    tiny_llama: Path, use: ReasoningUse, begin: str, end: str, method: str | None
) -> None:
    budget = 6
    guide = guide_behind(use, {"regex": "[0-9]{3}"}, budget)
    assert guide is not None
    speculation = SpeculationConfig(methods=method, throttle="off") if method else None
    engine = make_engine(tiny_llama, speculation=speculation)
    try:
        found = texts(engine, guide, num_requests=3)
        assert found
        for text in found:
            if begin and not text.startswith(begin):
                assert re.fullmatch(r"<\|channel\|>final<\|message\|>[0-9]{3}", text)
                continue
            thoughts, mark, answer = text.removeprefix(begin).partition(end)
            assert mark and re.fullmatch("\n{0,2}[0-9]{3}", answer), text
            assert len(engine.tokenizer.encode(thoughts, add_special_tokens=False)) <= 4 * budget
    finally:
        engine.close()
