"""Guided decoding: whatever the model would say, the text fits the grammar; a bad grammar is refused at the door."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xgrammar
from engine_driver import Told, make_engine, run_all, run_steps
from slipstream.core.errors import RequestError
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import Guide, SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.grammar_compiler import GrammarCompiler
from slipstream.engine.grammar_host import DEAD_END
from slipstream.engine.llm import LLM
from slipstream.worker.sample.structured_output import GrammarMasks, MaskApplier

ENGINE_OF_ITS_OWN = """
import json, sys
from pathlib import Path
sys.path[:] = {path!r}
from engine_driver import GREEDY, make_engine, run_all
from slipstream.core.sampling_params import Guide
from dataclasses import replace
engine = make_engine(Path({checkpoint!r}))
before, found = set(), []
for guide in (None, Guide("regex", "[a-z]{{3}}")):
    before = set(sys.modules)
    found += run_all(engine, [[70, 201, 33]], replace(GREEDY, temperature=1.0, max_tokens=9, guide=guide))
print(json.dumps([engine.tokenizer.decode(found[-1].token_ids, True), sorted(set(sys.modules) - before)]))
engine.close()
"""
PROMPT = [70, 201, 33]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
REGEX = r"[A-F]{2}-(17|29)[a-z]{1,4}"
EBNF = 'root ::= "(" item ("," item){0,3} ")"\nitem ::= "x" | "y" root | "zz"\n'
GUIDES = {
    "json": Guide("json"),
    "json_schema": Guide("json_schema", json.dumps(SCHEMA)),
    "regex": Guide("regex", REGEX),
    "ebnf_grammar": Guide("ebnf_grammar", EBNF),
}
PARAMS = SamplingParams(max_tokens=300, temperature=1.0)


def _texts(engine: Engine, params: SamplingParams, num_requests: int = 1) -> list[str]:
    """Texts of all sequences that ended by themselves, without their end token."""
    told: dict[Request, Told] = {}
    for index in range(num_requests):
        engine.submit(Request(list(PROMPT), replace(params, seed=index), handle=index))
    run_steps(engine, told)
    assert engine.error is None and engine.scheduler.cache.num_used_blocks == 0
    assert all(one.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for one in told.values()), told
    in_order = sorted(told, key=lambda request: (request.handle, request.sequence_index))  # grammars open in any order
    ended = [told[request] for request in in_order if told[request].finish_reason is FinishReason.STOP]
    return [engine.tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in ended]


def _error(engine: Engine, params: SamplingParams) -> str:
    """Why a request is refused: at once, or once its grammar has been tried."""
    try:
        (request,) = engine.submit(Request(list(PROMPT), params))
    except RequestError as error:
        return str(error)
    told: dict[Request, Told] = {}
    run_steps(engine, told)
    assert told[request].fault is RequestError and not told[request].token_ids
    assert engine.error is None and not engine.has_work and engine.scheduler.cache.num_used_blocks == 0
    return told[request].error


def _is_in_ebnf(text: str) -> bool:
    while True:
        shorter = re.sub(r"y?\((x|zz)(,(x|zz)){0,3}\)", "x", text)
        if shorter == text:
            return text == "x"
        text = shorter


def test_schema_holds_with_n(engine: Engine) -> None:
    texts = _texts(engine, replace(PARAMS, n=3, guide=GUIDES["json_schema"]), num_requests=2)
    assert len(texts) >= 4
    for text in texts:
        value = json.loads(text)
        assert set(value) == {"name", "age", "kind"} and value["kind"] in ("cat", "dog")
        assert isinstance(value["age"], int) and 0 <= value["age"] <= 150 and len(value["name"]) <= 6


def test_any_json_parses(engine: Engine) -> None:
    texts = _texts(engine, replace(PARAMS, n=8, guide=GUIDES["json"]))
    assert texts
    for text in texts:
        json.loads(text)


def test_any_object_is_an_object(engine: Engine) -> None:
    """As `response_format: json_object`: builtin JSON gave lists and numbers too."""
    guide = Guide("json_schema", '{"type": "object", "additionalProperties": true}')
    texts = _texts(engine, replace(PARAMS, n=8, guide=guide))
    assert texts and all(isinstance(json.loads(text), dict) for text in texts)
    compiler = GrammarCompiler(engine.config.model.model, engine.spec.vocab_size, [0])
    for text, is_good in (('{"a": [1, {"b": null}]}', True), ("{}", True), ("[1]", False), ("1", False)):
        assert xgrammar.GrammarMatcher(compiler.compile(guide)).accept_string(text) is is_good


def test_regex_matches_wholly(engine: Engine) -> None:
    texts = _texts(engine, replace(PARAMS, n=6, guide=GUIDES["regex"]))
    assert len(texts) == 6 and len(set(texts)) > 1
    assert all(re.fullmatch(REGEX, text) for text in texts)


def test_ebnf_is_obeyed(engine: Engine) -> None:
    texts = _texts(engine, replace(PARAMS, n=6, guide=GUIDES["ebnf_grammar"]))
    assert texts and all(_is_in_ebnf(text) for text in texts)


def test_a_grammar_makes_the_engine_import_nothing(tiny_llama: Path) -> None:
    """xgrammar takes 0.7 s, in which no stream gets a token: only the grammar processes have it."""
    code = ENGINE_OF_ITS_OWN.format(path=[place for place in sys.path if place], checkpoint=str(tiny_llama))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    text, imported = json.loads(done.stdout)
    assert re.fullmatch("[a-z]{3}", text)
    assert imported == ["slipstream_kernels.sample.reference.token_masks"]  # on a GPU the warm-up imports Triton-lang's


def test_masks_do_what_xgrammar_would_do() -> None:
    """Also where the vocabulary ends within a word, and where logits are wider than it: these stay."""
    vocab_size, rows = 4100, [6, 0, 3]
    logits, generator = torch.randn(8, vocab_size + 60), torch.Generator().manual_seed(1)
    bits = torch.randint(-(1 << 31), 1 << 31, (8, -(-vocab_size // 32)), generator=generator).int()
    expected = logits.clone()
    xgrammar.apply_token_bitmask_inplace(expected, bits, vocab_size=vocab_size, indices=rows)
    MaskApplier(vocab_size, logits.device).apply(logits, GrammarMasks(rows, bits[rows].numpy()))
    assert torch.equal(logits, expected) and 0 < int(logits.isinf().sum()) < 3 * vocab_size


def test_tokens_of_the_head_that_the_tokenizer_lacks_are_forbidden(engine: Engine) -> None:
    num_known = engine.tokenizer.vocab_size
    vocab_size = num_known + 75
    compiler = GrammarCompiler(engine.config.model.model, vocab_size, [0])
    bits = xgrammar.allocate_token_bitmask(1, vocab_size)
    xgrammar.GrammarMatcher(compiler.compile(GUIDES["json"])).fill_next_token_bitmask(bits)
    logits = torch.zeros(2, vocab_size)
    MaskApplier(vocab_size, logits.device).apply(logits, GrammarMasks([1], bits.numpy()))
    assert logits[1, num_known:].isneginf().all() and logits[1, :num_known].isfinite().any()
    assert not logits[0].any()


def test_guides_survive_preemption(tiny_llama: Path) -> None:
    """Mixed with unguided neighbours in a pool too small for all of them."""
    engine = make_engine(tiny_llama, model={"max_model_len": 96}, cache={"num_blocks": 12})
    guided = replace(PARAMS, n=5, seed=1, max_tokens=80, guide=Guide("regex", "[a-z]{60}[0-9]"))
    free = SamplingParams(max_tokens=40, ignore_eos=True)
    sequences = engine.submit(Request(list(PROMPT), guided, handle=1))
    engine.submit(Request([5, 6, 7], free, handle=2))
    told: dict[Request, Told] = {}
    run_steps(engine, told)
    assert sum(sequence.num_preemptions for sequence in sequences) > 0
    for sequence in sequences:
        assert told[sequence].finish_reason is FinishReason.STOP
        assert re.fullmatch("[a-z]{60}[0-9]", engine.tokenizer.decode(told[sequence].token_ids, True))


def test_guide_ends_without_an_end_token(engine: Engine) -> None:
    texts = _texts(engine, replace(PARAMS, ignore_eos=True, guide=Guide("regex", "[ab]{4}")))
    assert len(texts) == 1 and re.fullmatch("[ab]{4}", texts[0])


@pytest.mark.parametrize("ends", [{"ignore_eos": True}, {"end_id": -1}])
@pytest.mark.parametrize(
    ("text", "expected", "reason"),
    [
        ("[ab]{2,9}", "[ab]{9}", FinishReason.STOP),
        ("x(yz?){0,2}", "xyz?yz?", FinishReason.STOP),
        ("[0-9]+", "[0-9]{12,}", FinishReason.LENGTH),
        ("(ab|cd)*", "(ab|cd)+[ac]?", FinishReason.LENGTH),
    ],
)
def test_without_end_tokens_a_guide_goes_on_while_it_can(
    engine: Engine, text: str, expected: str, reason: FinishReason, ends: dict[str, object]
) -> None:
    """It ended where it might have ended, and one that admits the empty text was said to admit none."""
    for temperature in (0.0, 1.0):
        params = replace(PARAMS, max_tokens=12, temperature=temperature, guide=Guide("regex", text), **ends)
        (told,) = run_all(engine, [PROMPT], params)
        assert re.fullmatch(expected, engine.tokenizer.decode(told.token_ids, True))
        assert told.finish_reason is reason


@pytest.mark.parametrize("kind", ["json", "json_schema", "ebnf_grammar"])
def test_without_end_tokens_a_guide_ends_where_nothing_may_follow(engine: Engine, kind: str) -> None:
    texts = _texts(engine, replace(PARAMS, ignore_eos=True, guide=GUIDES[kind]), 4)
    assert texts and all(kind == "ebnf_grammar" or json.loads(text) is not None for text in texts)


def test_guide_wins_over_min_tokens(engine: Engine) -> None:
    texts = _texts(engine, replace(PARAMS, min_tokens=100, guide=Guide("regex", "[ab]{4}")))
    assert len(texts) == 1 and re.fullmatch("[ab]{4}", texts[0])


def test_the_end_token_of_a_guide_is_not_shown_before_min_tokens(tiny_llama: Path) -> None:
    """It was taken for a token of the text, whose end the grammar told a step later."""
    guided = replace(PARAMS, min_tokens=100, skip_special_tokens=False, guide=Guide("regex", "[ab]{4}"))
    with LLM(str(tiny_llama), block_size=8, num_blocks=64, device="cpu") as llm:
        for end_id in (None, 50):
            (found,) = llm.generate([PROMPT], replace(guided, end_id=end_id))
            assert re.fullmatch("[ab]{4}", found.text)
            assert (found.finish_reason, found.stop_reason) == ("stop", None)
            assert len(found.token_ids) > 1 and found.token_ids[-1] == (end_id or llm.engine.tokenizer.eos_token_id)


def test_greedy_and_seeded_guides_repeat(engine: Engine) -> None:
    params = replace(PARAMS, guide=GUIDES["regex"])
    assert _texts(engine, params, 3) == _texts(engine, params, 3)
    assert len(_texts(engine, replace(params, temperature=0.0))) == 1


@pytest.mark.parametrize(
    "guide",
    [
        Guide("json_schema", "{not json"),
        Guide("json_schema", '{"type": "nonsense"}'),
        Guide("json_schema", "3"),
        Guide("regex", "(ab"),
        Guide("regex", ""),
        Guide("ebnf_grammar", "root ::= missing"),
    ],
    ids=str,
)
def test_bad_grammar_is_refused(engine: Engine, guide: Guide) -> None:
    error = _error(engine, replace(PARAMS, guide=guide))
    assert error.startswith("guided_decoding_guide: ") and guide.type in error


@pytest.mark.parametrize(
    ("guide", "ignore_eos"),
    [
        (Guide("ebnf_grammar", "root ::= root"), False),
        (Guide("json_schema", '{"$ref": "#"}'), False),
        (Guide("regex", r"[^\s\S]"), False),
        (Guide("ebnf_grammar", 'root ::= ""'), True),
    ],
    ids=str,
)
def test_a_grammar_that_admits_nothing_is_refused(engine: Engine, guide: Guide, ignore_eos: bool) -> None:
    error = _error(engine, replace(PARAMS, guide=guide, ignore_eos=ignore_eos))
    assert error == f"guided_decoding_guide: not a usable {guide.type}: it admits no text"


def test_a_grammar_that_leads_nowhere_is_not_the_engines_fault(engine: Engine) -> None:
    told: dict[Request, Told] = {}
    dead_end = Guide("ebnf_grammar", 'root ::= "(" x\nx ::= x')
    guides = dead_end, Guide("ebnf_grammar", 'root ::= "(" ")"')
    requests = [engine.submit(Request(list(PROMPT), replace(PARAMS, guide=guide, seed=1)))[0] for guide in guides]
    run_steps(engine, told)
    stuck, fine = (told[request] for request in requests)
    assert (stuck.finish_reason, fine.finish_reason) == (FinishReason.ERROR, FinishReason.STOP)
    assert (stuck.error, stuck.fault) == (f"guided_decoding_guide: {DEAD_END}", RequestError)
    assert engine.error is None and engine.scheduler.cache.num_used_blocks == 0
