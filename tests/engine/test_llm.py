"""`slipstream.LLM`: text in, text out; streams, chats, threads; and the null runner."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from slipstream import LLM, SamplingParams
from slipstream.core.config import CacheConfig, EngineConfig, ModelConfig, ServingConfig
from slipstream.core.errors import RequestError
from slipstream.core.sampling_params import Guide

PARAMS = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
TEXTS = ["The quick brown fox", "def add(a, b):", "ça va très bien", "你好"]


def _config(checkpoint: Path, load_format: str = "auto") -> EngineConfig:
    model = ModelConfig(model=str(checkpoint), device="cpu", load_format=load_format)
    serving = ServingConfig(max_logprobs=-1)
    return EngineConfig(model=model, cache=CacheConfig(block_size=8, num_blocks=512), serving=serving)


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM.from_config(_config(tiny_llama)) as llm:
        yield llm


def test_import_is_light() -> None:
    code = "import sys, slipstream; assert slipstream.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_max_logprobs_holds_without_a_server(tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), device="cpu", num_blocks=64, max_logprobs=3) as llm:
        assert len(llm.generate("a", replace(PARAMS, logprobs=3))[0].logprobs[0].top) == 3
        for name, asked in (("logprobs", 4), ("prompt_logprobs", 4), ("logprobs", -1)):
            with pytest.raises(RequestError, match=f"^{name}: got {asked}, accepted: 0 to max_logprobs=3, a parameter"):
                llm.generate(["a", "b"], [PARAMS, replace(PARAMS, **{name: asked})])
        with pytest.raises(RequestError, match=r"^logprobs: got 4"):
            next(llm.stream("a", replace(PARAMS, logprobs=4)))
        assert llm.generate("a", PARAMS)[0].finish_reason == "length"


def test_keyword_arguments_are_the_config_parameters(tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), device="cpu", max_model_len=128, block_size=16) as llm:
        assert (llm.config.model.max_model_len, llm.config.cache.block_size) == (128, 16)
        assert llm.generate("a", PARAMS)[0].finish_reason == "length"


def test_text_and_ids_agree(llm: LLM) -> None:
    tokenizer = llm.engine.tokenizer
    by_text = llm.generate(TEXTS, PARAMS)
    by_ids = llm.generate([tokenizer.encode(text) for text in TEXTS], PARAMS)
    assert [c.text for c in by_text] == [c.text for c in by_ids] != [""] * 4
    for index, completion in enumerate(by_text):
        assert completion.prompt_index == index and completion.finish_reason == "length"
        assert completion.prompt_token_ids == tokenizer.encode(TEXTS[index])
        whole = tokenizer.decode(completion.prompt_token_ids + completion.token_ids)
        assert whole == tokenizer.decode(completion.prompt_token_ids) + completion.text
    assert llm.generate(TEXTS[0], PARAMS)[0].text == by_text[0].text


def test_the_forms_of_prompts_that_vllm_has(llm: LLM) -> None:
    ids = llm.engine.tokenizer.encode(TEXTS[1])
    expected = llm.generate(TEXTS[1], PARAMS)[0].text
    forms = [{"prompt": TEXTS[1]}, {"prompt_token_ids": ids}, {"prompt": "not read", "prompt_token_ids": tuple(ids)}]
    for prompts in (*forms, forms, np.array(ids), np.array([ids, ids]), iter([TEXTS[1]])):
        answers = llm.generate(prompts, sampling_params=PARAMS)
        assert {(answer.text, tuple(answer.prompt_token_ids)) for answer in answers} == {(expected, tuple(ids))}
    assert "".join(piece.text for piece in llm.stream(forms[1], sampling_params=PARAMS)) == expected


def test_a_salt_of_a_prompt_parts_cached_prefixes(llm: LLM) -> None:
    ids = list(range(40, 80))
    llm.generate({"prompt_token_ids": ids, "cache_salt": "one"}, PARAMS)
    cached = [llm.generate({"prompt_token_ids": ids, "cache_salt": salt}, PARAMS)[0] for salt in ("one", "two")]
    assert cached[0].num_cached_tokens > 0 == cached[1].num_cached_tokens


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "^multi_modal_data: is not served"),
        ({"input_ids": [1, 2]}, "^input_ids: .* accepted: prompt_token_ids"),
        ({}, "^prompt: is missing"),
        ({"prompt": 5}, "^prompt: got int"),
        ({"prompt_token_ids": "abc"}, "^prompt_token_ids: got str"),
        ({"prompt_token_ids": [1, "b"]}, "^prompt_token_ids: got a list with str"),
        ({"prompt": "a", "cache_salt": 5}, "^cache_salt: "),
        ([{"prompt": "a"}, [1.5]], "^prompt: got a list with float"),
        (5, "^prompts: got int"),
        (b"abc", "^prompt: got bytes"),
    ],
)
def test_other_forms_of_prompts_are_refused_by_name(llm: LLM, prompts: object, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, PARAMS)  # type: ignore[arg-type]
    assert not llm.engine.has_work


def test_what_is_no_sampling_params_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"^params: got dict"):
        llm.generate("a", {"max_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^sampling_params: given beside params"):
        llm.generate("a", PARAMS, sampling_params=PARAMS)
    unset = SamplingParams(stop=None, bad_words=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert unset == SamplingParams()


def test_stream_is_generate(llm: LLM) -> None:
    expected = llm.generate(TEXTS[1], PARAMS)[0]
    pieces = list(llm.stream(TEXTS[1], PARAMS))
    assert "".join(piece.text for piece in pieces) == expected.text
    assert [i for piece in pieces for i in piece.token_ids] == expected.token_ids
    assert len(pieces) > 3 and pieces[-1].is_final and not any(piece.is_final for piece in pieces[:-1])


def test_leaving_a_stream_frees_its_blocks(llm: LLM) -> None:
    for _ in llm.stream(TEXTS[0], replace(PARAMS, max_tokens=300)):
        assert llm.engine.scheduler.cache.num_used_blocks > 0
        break
    assert llm.engine.scheduler.cache.num_used_blocks == 0 and not llm.engine.has_work


def test_streams_interleave(llm: LLM) -> None:
    expected = [completion.text for completion in llm.generate(TEXTS[:2], PARAMS)]
    streams = [llm.stream(text, PARAMS) for text in TEXTS[:2]]
    got = ["", ""]
    while any(got[index] != expected[index] for index in range(2)):
        pieces = [next(stream, None) for stream in streams]
        assert any(pieces), got
        for index, piece in enumerate(pieces):
            got[index] += piece.text if piece is not None else ""
    assert got == expected


def test_threads_share_one_engine(llm: LLM) -> None:
    expected = [completion.text for completion in llm.generate(TEXTS, PARAMS)]
    got: dict[int, str] = {}

    def work(index: int) -> None:
        for _ in range(3):
            got[index] = llm.generate(TEXTS[index], PARAMS)[0].text

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[index] for index in range(4)] == expected


def test_n_and_params_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=3, n=2, seed=1, logprobs=1), SamplingParams(max_tokens=5, ignore_eos=True)]
    completions = llm.generate(TEXTS[:2], params)
    assert [(c.prompt_index, c.sequence_index) for c in completions] == [(0, 0), (0, 1), (1, 0)]
    assert len(completions[2].token_ids) == 5 and completions[2].logprobs is None
    assert completions[2].cumulative_logprob is None, "nobody asked for it: 0 would be a probability of 1"
    for completion in completions[:2]:
        assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
        assert completion.cumulative_logprob == pytest.approx(sum(e.logprob for e in completion.logprobs))


def test_more_logprobs_than_tokens_are_those_of_all(llm: LLM) -> None:
    """The kernel refuses more than the vocabulary, on the engine's thread: the engine would end."""
    size = llm.engine.spec.vocab_size
    (told,) = llm.generate(TEXTS[0], replace(PARAMS, max_tokens=1, logprobs=size + 1, prompt_logprobs=size + 1))
    assert len(dict(told.logprobs[0].top)) == size and llm.engine.error is None


def test_logprobs_of_tokens_asked_for(llm: LLM) -> None:
    whole = llm.generate(TEXTS[0], replace(PARAMS, max_tokens=3, logprobs=-1))[0]
    of_all = [dict(entry.top) for entry in whole.logprobs]
    assert all(len(entry) == llm.engine.spec.vocab_size for entry in of_all)
    asked = [7, 300, whole.token_ids[1]]
    params = [replace(PARAMS, max_tokens=3, logprob_token_ids=tuple(asked)), replace(PARAMS, max_tokens=3, logprobs=2)]
    told, beside = llm.generate([TEXTS[0], TEXTS[1]], params)
    for entry, expected in zip(told.logprobs, of_all):
        assert not entry.top and [token_id for token_id, _ in entry.asked] == asked
        assert [value for _, value in entry.asked] == pytest.approx([expected[i] for i in asked], abs=1e-4)
    assert all(not entry.asked and len(entry.top) == 2 for entry in beside.logprobs)


def test_one_stop_string_needs_no_list(llm: LLM) -> None:
    free = llm.generate(TEXTS[1], replace(PARAMS, max_tokens=40))[0].text
    word = free[5:9]
    stopped = llm.generate(TEXTS[1], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, stop=word))[0]
    assert stopped.stop_reason == word and stopped.text == free[: free.index(word)]


def test_biases_may_be_an_object(llm: LLM) -> None:
    one = replace(PARAMS, logit_bias={9: 100.0})  # type: ignore[arg-type]
    assert one.logit_bias == ((9, 100.0),) and llm.generate(TEXTS[0], one)[0].token_ids == [9] * 20
    with pytest.raises(RequestError, match="logit_bias: got"):
        SamplingParams(logit_bias={"nine": 1.0})  # type: ignore[arg-type]


def test_drafts_of_a_model_without_any_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="num_draft_tokens: got 4, accepted: 0, because the model has no"):
        llm.generate(TEXTS[0], replace(PARAMS, num_draft_tokens=4))
    assert llm.generate(TEXTS[0], replace(PARAMS, num_draft_tokens=0))[0].token_ids


def test_stop_strings(llm: LLM) -> None:
    free = llm.generate(TEXTS[1], replace(PARAMS, max_tokens=40))[0].text
    stop = next(free[i : i + 2] for i in range(4, len(free)) if free[i : i + 2].isprintable())
    ended = llm.generate(TEXTS[1], replace(PARAMS, max_tokens=40, stop=(stop,)))[0]
    assert ended.text == free[: free.index(stop)]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    assert llm.engine.scheduler.cache.num_used_blocks == 0 and not llm.engine.has_work


def test_chat_uses_the_template(llm: LLM) -> None:
    completion = llm.chat([{"role": "user", "content": "hello"}], PARAMS)[0]
    assert llm.engine.tokenizer.decode(completion.prompt_token_ids, False) == "<|user|>hello\n"
    assert len(llm.chat([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]], PARAMS)) == 2
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert llm.chat([{"role": "user", "content": parts}], sampling_params=PARAMS)[0].text == completion.text


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "^messages: got str"),
        ({"role": "user", "content": "a"}, "^messages: got dict"),
        ([[]], "^messages: got an empty conversation"),
        ([{"content": "a"}], r"^messages\[0\]: is no message"),
        ([{"role": "user"}], r"^messages\[0\].content: is missing"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"^messages\[0\].content\[0\]: got type 'image_url'"),
    ],
)
def test_other_forms_of_chats_are_refused_by_name(llm: LLM, messages: object, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.chat(messages, PARAMS)  # type: ignore[arg-type]


def test_a_chat_passes_tools_and_values_to_the_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}"
    source += "{{ m.content }}{% endfor %}{{ tools[0].function.name }}{{ mood }}{{ add_generation_prompt }}"
    monkeypatch.setattr(llm._chat_tokenizer, "chat_template", source)
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [{"role": "assistant", "content": "a", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    values = {"mood": "calm", "add_generation_prompt": False}
    [answer] = llm.chat(messages, PARAMS, tools=tools, chat_template_kwargs=values)
    assert llm.engine.tokenizer.decode(answer.prompt_token_ids, False) == "RomeaweathercalmFalse"


def test_one_bad_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt"):
        llm.generate([[5, 6], [7] * 9999], PARAMS)
    assert not llm.engine.has_work and llm.engine.scheduler.cache.num_used_blocks == 0


def test_more_prompts_than_may_wait(tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), device="cpu", max_num_seqs=2, max_waiting_requests=3, num_blocks=64) as llm:
        completions = llm.generate([[5 + i] for i in range(20)], replace(PARAMS, max_tokens=3))
    assert [completion.prompt_token_ids for completion in completions] == [[5 + i] for i in range(20)]
    assert all(len(completion.token_ids) == 3 for completion in completions)


def test_null_runner_needs_no_weights(tiny_llama: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_llama / name).read_bytes())
    with LLM.from_config(_config(tmp_path, "null")) as llm:
        completions = llm.generate(TEXTS, replace(PARAMS, max_tokens=200))
    for completion in completions:
        assert len(set(completion.token_ids)) == 1 and len(completion.token_ids) == 200
        assert completion.text.strip() and completion.text == llm.engine.tokenizer.decode(completion.token_ids)


def test_a_prompt_that_is_empty_or_cannot_fit_is_refused_as_by_the_server(llm: LLM) -> None:
    for prompt, words in (("", "the prompt is empty"), ("a" * 10**6, "1000000 bytes"), ([], "no tokens")):
        with pytest.raises(RequestError, match=f"^prompt: .*{words}"):
            llm.generate([prompt])
    assert not llm.engine.has_work


def test_the_null_runner_keeps_to_a_grammar(tiny_llama: Path) -> None:
    pytest.importorskip("xgrammar")
    params = SamplingParams(max_tokens=8, guide=Guide("regex", "(ab|cd)"))
    with LLM.from_config(_config(tiny_llama, "null")) as llm:
        [answer] = llm.generate("a", params)
    assert answer.finish_reason == "stop" and answer.text in ("ab", "cd")
