"""Fields of vLLM's and OpenAI's requests beyond the usual, on the real server: each with its effect."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
from fake_triton import FakeTriton
from gateway import GatewayProcess
from slipstream.server import logprobs
from slipstream.server.errors import ApiError
from slipstream.server.generation import Response
from slipstream.server.logprobs import Entry, LogprobForm, chat_logprobs, completion_logprobs, first_token_text
from slipstream.server.model_tokenizer import (
    MAX_TOKENIZED_AT_ONCE,
    MAX_WAITING_CHARS,
    ModelTokenizer,
    TokenizerThreads,
)
from slipstream.server.schemas import Sampling, TokenizeRequest
from slipstream.server.token_ids import stop_reason
from slipstream.server.tokenize import _json, tokenize
from tokenizers import Tokenizer

PROMPT = "def add(a, b):\n"
CHAT = {"model": "llm", "messages": [{"role": "user", "content": "add two numbers"}], "max_tokens": 4}
PLAIN = {"model": "llm", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CALL = ['<tool_call>{"name": "f", "argum', 'ents": {"a": 1}}</tool_call>', '<tool_call>{"name": "g"}</tool_call>']


@pytest.fixture(scope="module")
def tokenizer(demo_model: object) -> Tokenizer:
    return Tokenizer.from_file(f"{demo_model}/tokenizer.json")


def test_token_ids_come_beside_the_text(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT).ids
    asked = {**PLAIN, "n": 2, "temperature": 1, "seed": 5, "echo": True, "extra_body": {"return_token_ids": True}}
    for choice in client.completions.create(**asked).choices:
        assert choice.prompt_token_ids == ids and len(choice.token_ids) == 4
        assert choice.text == PROMPT + tokenizer.decode(choice.token_ids)
    chat = client.chat.completions.create(**CHAT, temperature=0, extra_body={"return_token_ids": True})
    rendered = tokenizer.encode("<|endoftext|># User: add two numbers\n\n", add_special_tokens=False).ids
    assert chat.prompt_token_ids == rendered
    got: list[int] = []
    prompts = []
    for chunk in client.chat.completions.create(
        **CHAT, temperature=0, stream=True, extra_body={"return_token_ids": True}
    ):
        for choice in chunk.choices:
            got += getattr(choice, "token_ids", [])
            prompts.append(getattr(choice, "prompt_token_ids", None))
    assert got == chat.choices[0].token_ids and prompts.count(rendered) == 1


def test_counts_come_with_every_chunk(client: openai.OpenAI) -> None:
    """vLLM's continuous_usage_stats: of completions as of chats, beside log-probabilities, for several prompts."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    several = {**PLAIN, "prompt": [PROMPT, PROMPT], "n": 2, "temperature": 1}
    for ask, body in (
        (client.completions, PLAIN),
        (client.completions, {**PLAIN, "logprobs": 1}),
        (client.completions, several),
        (client.chat.completions, {**CHAT, "temperature": 0}),
    ):
        *chunks, last = ask.create(**body, stream=True, stream_options=options)
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
        assert counts == sorted(counts) and counts[-1] == last.usage.completion_tokens and not last.choices
        texts = [chunk for chunk in chunks if getattr(chunk.choices[0], "text", "")]
        assert all(chunk.usage for chunk in texts) and len(set(counts)) >= 4
        told = list(ask.create(**body, stream=True, stream_options={"include_usage": True}))
        assert not any(chunk.usage for chunk in told[:-1]) and told[-1].usage.prompt_tokens == last.usage.prompt_tokens


def test_a_choice_says_which_stop_ended_it(client: openai.OpenAI) -> None:
    """A stop string as text, a stop token as its number, null for another end; without stops there is no such key."""
    plain = {**PLAIN, "extra_body": {"return_token_ids": True}}
    [free] = client.completions.create(**plain).choices
    assert "stop_reason" not in free.model_extra
    text, last = free.text[-2:], free.token_ids[-1]
    cases = [({"stop": ["never", text]}, text), ({"extra_body": {"stop_token_ids": [last]}}, last)]
    for stops, wanted in [*cases, ({"stop": "never"}, None)]:
        [choice] = client.completions.create(**PLAIN, **stops).choices
        assert choice.stop_reason == wanted and choice.finish_reason == ("length" if wanted is None else "stop")
        for ask, body in ((client.completions, PLAIN), (client.chat.completions, {**CHAT, "temperature": 0})):
            [whole] = ask.create(**body, **stops).choices
            chunks = [one for part in ask.create(**body, **stops, stream=True) for one in part.choices]
            told = [one.stop_reason for one in chunks if "stop_reason" in (one.model_extra or {})]
            assert told == [whole.stop_reason] and chunks[-1].finish_reason == whole.finish_reason


def test_a_stop_string_of_digits_is_no_token() -> None:
    def told(stop: str | list[str], text: str) -> object:
        response = Response({"stop_reason": 0}, [len(text).to_bytes(4, "little") + text.encode()])
        return stop_reason(Sampling(model="llm", stop=stop, stop_token_ids=[7]), response)["stop_reason"]

    assert told(["7", "x"], "7") == "7" and told("7", "7") == "7"
    assert told("x", "7") == 7 and told("x", "") is None


def test_log_probabilities_of_the_prompt(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT).ids
    told = client.completions.create(**PLAIN, extra_body={"prompt_logprobs": 1}).choices[0].prompt_logprobs
    assert told[0] is None and [next(iter(entry)) for entry in told[1:]] == [str(i) for i in ids[1:]]
    chat = client.chat.completions.create(**CHAT, extra_body={"prompt_logprobs": 0})
    assert chat.prompt_logprobs[0] is None and len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="only without stream"):
        client.chat.completions.create(**CHAT, stream=True, extra_body={"prompt_logprobs": 1})
    with pytest.raises(openai.BadRequestError, match="accepted: 0 to max_logprobs=20"):
        client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=21)


def test_tokens_asked_for_by_id(client: openai.OpenAI) -> None:
    extra = {"logprob_token_ids": [7, 300], "return_tokens_as_token_ids": True}
    told = client.completions.create(**PLAIN, logprobs=1, extra_body=extra).choices[0].logprobs
    assert all(token.startswith("token_id:") for token in told.tokens)
    assert all({"token_id:7", "token_id:300"} <= set(top) and len(top) >= 3 for top in told.top_logprobs)


def test_a_truncated_prompt_and_tokens_without_text(client: openai.OpenAI, greedy: Callable[..., str]) -> None:
    usage = client.completions.create(**PLAIN, extra_body={"truncate_prompt_tokens": 3}).usage
    assert usage.prompt_tokens == 3
    silent = client.completions.create(**PLAIN, extra_body={"detokenize": False, "return_token_ids": True}).choices[0]
    assert silent.text == "" and len(silent.token_ids) == 4


def test_tokenize_and_detokenize(gateway: GatewayProcess, client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    def post(path: str, **body: object) -> dict:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        headers = {"content-type": "application/json"}
        connection.request("POST", path, json.dumps({"model": "llm", **body}), headers)
        return json.loads(connection.getresponse().read())

    told = post("/tokenize", prompt=PROMPT, return_token_strs=True)
    ids = tokenizer.encode(PROMPT).ids
    assert told["tokens"] == ids and told["count"] == len(ids) and told["max_model_len"]
    assert "".join(told["token_strs"][1:]) == PROMPT, "behind the special token in front"
    assert post("/detokenize", tokens=ids) == {"prompt": tokenizer.decode(ids, skip_special_tokens=False)}
    chat = post("/tokenize", messages=CHAT["messages"])
    assert chat["count"] == client.chat.completions.create(**CHAT).usage.prompt_tokens
    for path, body, words in (
        ("/tokenize", {}, "a prompt or messages, one of them"),
        ("/detokenize", {"tokens": [10**6]}, "not in the vocabulary"),
        ("/detokenize", {"tokens": [-1]}, "greater than or equal to 0"),
    ):
        assert words in post(path, **body)["error"]["message"]


# ---------------------------------------------------------------- with a scripted model


def ask(client: openai.OpenAI, script: dict[str, object], **options: object) -> openai.types.chat.ChatCompletion:
    messages = [{"role": "user", "content": json.dumps(script)}]
    return client.chat.completions.create(model="hermes", messages=messages, **options)


def test_functions_are_tools_of_an_older_form(fake_client: openai.OpenAI) -> None:
    choice = ask(fake_client, {"pieces": CALL}, functions=[FUNCTION]).choices[0]
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    assert (choice.message.function_call.name, json.loads(choice.message.function_call.arguments)) == ("f", {"a": 1})
    name = arguments = ""
    for chunk in ask(fake_client, {"pieces": CALL}, functions=[FUNCTION], function_call="auto", stream=True):
        call = chunk.choices[0].delta.function_call
        name += (call.name or "") if call else ""
        arguments += (call.arguments or "") if call else ""
        reason = chunk.choices[0].finish_reason
    assert (name, json.loads(arguments), reason) == ("f", {"a": 1}, "function_call")
    tools = [{"type": "function", "function": FUNCTION}]
    with pytest.raises(openai.BadRequestError, match="functions: given together with tools"):
        ask(fake_client, {}, functions=[FUNCTION], tools=tools)


def test_an_echo_begins_with_what_the_answer_continues(fake_client: openai.OpenAI) -> None:
    start = json.dumps({"pieces": ["b", "c"]})
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": start}]
    extra = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
    asked = {"model": "plain", "messages": messages, "extra_body": extra}
    assert fake_client.chat.completions.create(**asked).choices[0].message.content == start + "bc"
    chunks = fake_client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == start + "bc"


def test_values_for_the_template_and_older_names(fake_client: openai.OpenAI, fake_triton: FakeTriton) -> None:
    ask(fake_client, {}, verbosity="low", extra_body={"documents": [{"title": "a"}], "guided_choice": ["a", "b"]})
    assert fake_triton.sampling[-1]["structured_outputs"] == {"choice": ["a", "b"]}
    with pytest.raises(openai.BadRequestError, match="chat_template: not served, because a template is code"):
        ask(fake_client, {}, extra_body={"chat_template": "{{ 1 }}"})
    two = {"guided_regex": "a", "structured_outputs": {"regex": "b"}}
    with pytest.raises(openai.BadRequestError, match="structured_outputs and guided_regex are given together"):
        ask(fake_client, {}, extra_body=two)


def test_an_empty_text_has_no_embedding(fake_client: openai.OpenAI) -> None:
    for wrong in ("", ["a", ""]):
        with pytest.raises(openai.BadRequestError, match="input: has an empty text"):
            fake_client.embeddings.create(model="encoder", input=wrong)


@pytest.mark.parametrize("form", ["float", "base64"])
def test_an_embedding_that_is_no_number_is_the_fault_of_the_model(fake_client: openai.OpenAI, form: str) -> None:
    body = {"model": "encoder", "input": ["x", "nan"], "encoding_format": form}
    with pytest.raises(openai.InternalServerError, match="the model 'encoder' gave numbers that are not finite"):
        fake_client.post("/embeddings", cast_to=dict, body=body)


def test_an_echo_is_not_of_a_truncated_prompt(fake_client: openai.OpenAI) -> None:
    extra = {"truncate_prompt_tokens": 3}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="echo and truncate_prompt_tokens: accepted: one of them"):
            fake_client.completions.create(model="plain", prompt="{}", echo=True, stream=stream, extra_body=extra)


def test_texts_of_tokens_are_looked_up_on_a_thread() -> None:
    threads = set()

    class Slow:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [1, 2]

        def token_text(self, token_id: int) -> str:
            threads.add(threading.get_ident())
            return str(token_id)

    async def find(name: str) -> SimpleNamespace:
        return SimpleNamespace(tokenizer=SimpleNamespace(loaded=Slow), max_model_len=8)

    gateway = SimpleNamespace(catalog=SimpleNamespace(find=find), tokenizing=TokenizerThreads())
    asked = TokenizeRequest(model="llm", prompt="x", return_token_strs=True)
    http = SimpleNamespace(state=SimpleNamespace(lease=SimpleNamespace(owner=b"me")))
    told = json.loads(asyncio.run(tokenize(gateway, asked, http)).body)
    assert told == {"count": 2, "max_model_len": 8, "tokens": [1, 2], "token_strs": ["1", "2"]}
    assert threads and threading.get_ident() not in threads, "the event loop serves others meanwhile"


def test_json_of_long_lists_is_written_in_parts() -> None:
    for size in (0, 1, 4096, 4097, 9000):
        numbers, texts = list(range(size)), [f'"{number}é' for number in range(size)]
        assert json.loads(_json(numbers)) == numbers and json.loads(_json(texts)) == texts
    assert _json(None) == "null" and json.loads(_json("é\ud800")) == "é\ud800"


def test_one_key_cannot_fill_the_threads_that_tokenize() -> None:
    async def run() -> None:
        threads, go_on = TokenizerThreads(), threading.Event()
        held = [asyncio.create_task(threads.run(b"me", MAX_WAITING_CHARS // 2, go_on.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match=f"accepted: {MAX_WAITING_CHARS}; try again later") as error:
            await threads.run(b"me", 1, go_on.wait)
        assert error.value.status_code == 429
        held.append(asyncio.create_task(threads.run(b"you", 2 * MAX_WAITING_CHARS, go_on.wait)))  # a first one always
        await asyncio.sleep(0)
        go_on.set()
        assert all(await asyncio.gather(*held)) and await threads.run(b"me", MAX_WAITING_CHARS, go_on.wait)
        threads.close()

    asyncio.run(run())


def test_one_long_text_is_tokenized_at_a_time_and_short_ones_beside_it() -> None:
    """A million characters take up to 0.6 GB until they are token ids."""

    async def run() -> None:
        threads, go_on, begun = TokenizerThreads(), threading.Event(), list[bytes]()

        def work(owner: bytes) -> bool:
            begun.append(owner)
            return go_on.wait(10)

        owners = [b"me", b"you", b"them"]
        held = [
            asyncio.create_task(threads.run(owner, MAX_TOKENIZED_AT_ONCE + 1, partial(work, owner))) for owner in owners
        ]
        for owner in owners:
            await asyncio.wait_for(threads.run(owner, MAX_TOKENIZED_AT_ONCE, lambda: None), 10)
        assert begun == [b"me"]
        go_on.set()
        assert all(await asyncio.gather(*held)) and begun == owners
        threads.close()

    asyncio.run(run())


# ---------------------------------------------------------------- log-probabilities of an echoed prompt


def entry(token_id: int, text: str, rank: int | None = 1) -> Entry:
    return {str(token_id): {"logprob": -0.5, "rank": rank, "decoded_token": text}}


def test_the_first_token_of_an_echo_has_its_text_and_place(tmp_path: Path) -> None:
    form = LogprobForm(ModelTokenizer(tmp_path))
    told = [None, entry(2, " quick"), entry(3, " fox")]
    first = first_token_text("The quick fox", told, form)
    assert first == "The"
    shown = completion_logprobs([*told, entry(4, " ran")], form, first=first)
    assert shown["tokens"] == ["The", " quick", " fox", " ran"] and shown["text_offset"] == [0, 3, 9, 13]
    assert shown["token_logprobs"][0] is None and shown["top_logprobs"][0] is None
    assert first_token_text(" quick fox", told, form) == "", "a special token in front is no part of the text"


def test_offsets_count_characters_that_tokens_share(demo_model: object) -> None:
    tokenizer = ModelTokenizer(Path(str(demo_model)))
    ids = tokenizer.loaded().encode("é…x", False)
    entries = [entry(i, tokenizer.loaded().token_text(i)) for i in ids]
    offsets = completion_logprobs(entries, LogprobForm(tokenizer))["text_offset"]
    assert offsets[0] == 0 and offsets[-1] == 2 and offsets == sorted(offsets)


def test_alternatives_without_a_rank_are_shown_last(tmp_path: Path) -> None:
    told = {**entry(9, "c", None), **entry(5, "a", 2), **entry(6, "b", 1)}
    chosen = {**entry(5, "a", 2), **entry(6, "b", 1), **told}
    form = LogprobForm(ModelTokenizer(tmp_path), 1)
    assert [token["token"] for token in chat_logprobs([chosen], form)["content"][0]["top_logprobs"]] == ["b", "c"]
    assert list(completion_logprobs([chosen], form)["top_logprobs"][0]) == ["b", "a", "c"], "with the chosen one"
    shown = completion_logprobs([chosen], LogprobForm(ModelTokenizer(tmp_path), -1))["top_logprobs"][0]
    assert list(shown) == ["b", "a", "c"]


TOKEN_TEXTS = ["a", '}}, {"', "}}, {", "\\", '"', '\\}}, {\\"', "\u00e9", "null, {"]


@pytest.mark.parametrize("part_chars", [0, 1, 50, 1 << 20])
@pytest.mark.parametrize("count", [0, 1, 2, 20])
def test_entries_are_read_in_parts(part_chars: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_PART_CHARS", part_chars)
    texts = [TOKEN_TEXTS[index % len(TOKEN_TEXTS)] for index in range(count)]
    entries: list[Entry | None] = [
        {str(token_id): {"logprob": -1.5, "rank": token_id, "decoded_token": text} for token_id in (1, 2)}
        for text in texts
    ]
    form = LogprobForm(ModelTokenizer(None), 1)
    for found in (entries, [None, *entries]):
        text = json.dumps(found)
        assert logprobs.parse(text) == found
        assert json.loads(logprobs.written_chat_logprobs(text, form).data) == chat_logprobs(found, form)
    assert logprobs.parse("") == logprobs.parse("null") == []
