"""OpenAI's Responses API with OpenAI's own client: text, tools, events, answers that are kept; and its bounds."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
from fake_triton import FakeTriton
from gateway import GatewayProcess
from slipstream.server.options import GatewayOptions
from slipstream.server.responses import store as store_module
from slipstream.server.responses.answer import ResponseWriter
from slipstream.server.responses.schemas import ResponsesRequest
from slipstream.server.responses.store import ResponseStore

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
CALLS = ["Let me see.", '<tool_call>{"name": "f", "argum', 'ents": {"a": 1}}</tool_call>']


@pytest.fixture(scope="module")
def other_key(fake_gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    yield openai.OpenAI(base_url=f"{fake_gateway.url}/v1", api_key="sk-also", max_retries=0, timeout=120)


def script(**what: object) -> str:
    return json.dumps(what)


def test_a_text_is_the_chats(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="llm",
        messages=[{"role": "system", "content": "Be short"}, {"role": "user", "content": "add"}],
        temperature=0,
        max_tokens=8,
    )
    asked = {"model": "llm", "instructions": "Be short", "input": "add", "temperature": 0, "max_output_tokens": 8}
    answer = client.responses.create(**asked)
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, 8)
    with client.responses.stream(**asked) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert deltas == answer.output_text
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"format": {"type": "json_schema", "name": "a", "schema": {**schema, "additionalProperties": False}}}
    told = client.responses.create(**{**asked, "max_output_tokens": 200}, text=form)
    assert isinstance(json.loads(told.output_text)["ok"], bool) and told.status == "completed"


def test_items_of_every_kind_reach_the_model(fake_client: openai.OpenAI, fake_triton: FakeTriton) -> None:
    items = [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": script(pieces=["sunny"])},
    ]
    answer = fake_client.responses.create(model="hermes", input=items, tools=[TOOL], instructions="y")
    assert answer.output_text == "sunny" and answer.status == "completed"
    assert answer.output[0].content[0].type == "output_text" and answer.usage.total_tokens == 6


def test_calls_are_items(fake_client: openai.OpenAI) -> None:
    asked = {"model": "hermes", "input": script(pieces=CALLS), "tools": [TOOL]}
    answer = fake_client.responses.create(**asked)
    message, call = answer.output
    assert message.content[0].text == "Let me see." and answer.output_text == "Let me see."
    assert (call.type, call.name, json.loads(call.arguments), call.status) == (
        "function_call",
        "f",
        {"a": 1},
        "completed",
    )
    assert call.call_id.startswith("call_")


def test_events_come_in_order_and_make_up_the_answer(fake_client: openai.OpenAI) -> None:
    asked = {"model": "hermes", "input": script(pieces=CALLS), "tools": [TOOL], "stream": True}
    events = list(fake_client.responses.create(**asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-1] == "completed" and kinds.count("output_item.added") == kinds.count("output_item.done") == 2
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert json.loads("".join(deltas)) == json.loads(done.arguments) == {"a": 1}
    final = events[-1].response
    assert [item.type for item in final.output] == ["message", "function_call"] and final.usage.output_tokens == 3


def test_a_fault_in_mid_stream_is_an_event(fake_client: openai.OpenAI) -> None:
    broken = script(pieces=["a"], fail=["", "it broke"])
    with pytest.raises(openai.APIError, match="it broke"):
        list(fake_client.responses.create(model="plain", input=broken, stream=True))


def test_an_answer_is_continued_read_and_deleted(
    fake_client: openai.OpenAI, fake_triton: FakeTriton, other_key: openai.OpenAI
) -> None:
    first = fake_client.responses.create(model="plain", input=script(), instructions="gone next time")
    assert fake_client.responses.retrieve(first.id).output_text == first.output_text == "hello"
    follow = script(pieces=["more"])
    streamed = list(
        fake_client.responses.create(model="plain", input=follow, previous_response_id=first.id, stream=True)
    )[-1].response
    assert streamed.previous_response_id == first.id and streamed.output_text == "more"
    third = fake_client.responses.create(model="plain", input=follow, previous_response_id=streamed.id)
    assert third.output_text == "more"
    with pytest.raises(openai.NotFoundError):
        other_key.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="is not kept") as error:
        other_key.responses.create(model="plain", input="x", previous_response_id=first.id)
    assert error.value.code == "previous_response_not_found"
    fake_client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        fake_client.responses.retrieve(first.id)
    unkept = fake_client.responses.create(model="plain", input=follow, store=False)
    with pytest.raises(openai.NotFoundError):
        fake_client.responses.retrieve(unkept.id)


@pytest.mark.parametrize("place", ["header", "field"])
def test_the_id_of_a_kept_answer_is_nobodys_choice(fake_client: openai.OpenAI, place: str) -> None:
    """Two callers with the same request id have two kept answers; the id was the request's, for others to guess."""
    chosen: dict = {
        "header": {"extra_headers": {"x-request-id": "a/1"}},
        "field": {"extra_body": {"request_id": "a/1"}},
    }
    texts = ("one", "other")
    made = [
        fake_client.responses.create(model="plain", input=script(pieces=[text]), **chosen[place]).id for text in texts
    ]
    assert all("a/1" not in one and len(one) == len("resp_") + 32 for one in made)
    assert tuple(fake_client.responses.retrieve(one).output_text for one in made) == texts
    for guess in ("resp_a/1", "resp_"):
        with pytest.raises(openai.BadRequestError, match="is not kept"):
            fake_client.responses.create(model="plain", input="x", previous_response_id=guess)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": []}, "at least 1"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\].type: got 'item_reference'"),
        ({"input": [{"role": "tool", "content": "x"}]}, r"input\[0\].role: accepted"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "this is a text model"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]},
            r"input\[0\].arguments: accepted: a string",
        ),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema: is missing"),
        ({"extra_body": {"n": 2}}, "n: got 2, accepted: 1"),
        ({"background": True}, "background: not served"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt: not served"),
        ({"top_logprobs": 2}, "top_logprobs: got 2, accepted: 0; log-probabilities"),
        ({"include": ["message.output_text.logprobs"]}, "include: got 'message.output_text.logprobs'; log-prob"),
        ({"input": [{"role": [], "content": "x"}]}, r"input\[0\].role: accepted"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata: .*at most 16"),
        ({"metadata": {"k" * 65: "x"}}, "metadata: .*at most 64"),
        ({"metadata": {"k": "x" * 513}}, "metadata.k: .*at most 512"),
        ({"max_output_tokens": 0}, "greater than or equal to 1"),
    ],
)
def test_wrong_requests(fake_client: openai.OpenAI, fields: dict, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        fake_client.responses.create(**{"model": "plain", "input": "{}", **fields})


def test_an_answer_is_kept_on_a_thread_and_its_end_says_so() -> None:
    threads = []

    def keep(body: dict) -> None:
        threads.append(threading.get_ident())
        body["store"] = False

    reader = SimpleNamespace(reason="stop")
    writer = ResponseWriter(ResponsesRequest(model="m", input="x"), reader, SimpleNamespace(), keep)
    event = json.loads(asyncio.run(writer.last()).partition(b"data: ")[2])
    assert event["response"]["store"] is False, "what could not be kept is not said to be"
    assert threads and threading.get_ident() not in threads, "the event loop serves others meanwhile"
    reader.reason = ""
    assert asyncio.run(writer.last()) == b"" and len(threads) == 1, "an answer without its end is not kept"


# ---------------------------------------------------------------- the store


def body(name: str, size: int = 10) -> dict[str, object]:
    return {"id": name, "text": "x" * size}


def test_the_store_is_bounded_in_bytes_number_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(tmp_path, max_bytes=1000, ttl_s=60)
    for number in range(20):
        assert store.put(b"me", body(f"r{number}", 200), [])
        os.utime(store._path(b"me", f"r{number}"), (number + 1e9 * 2, number + 1e9 * 2))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000
    assert store.get(b"me", "r0") is None and store.get(b"me", "r19")["body"]["id"] == "r19"
    assert not store.put(b"me", body("large", 1000), []) and store.get(b"me", "r19"), "others are left"
    roomy = ResponseStore(tmp_path, max_bytes=1 << 30, ttl_s=60)
    assert not roomy.put(b"me", body("large", store_module.MAX_STORED_RESPONSE_BYTES), [])
    monkeypatch.setattr(store_module, "MAX_STORED_RESPONSES", 2)
    for number in range(5):
        store.put(b"me", body(f"s{number}"), [])
    assert len(list(tmp_path.iterdir())) == 2
    os.utime(store._path(b"me", "s4"), (1, 1))
    assert store.get(b"me", "s4") is None, "too old"


@pytest.mark.parametrize("limit", ["bytes", "number"])
def test_one_key_drives_out_its_own_answers_and_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(store_module, "MAX_STORED_RESPONSES", 10 if limit == "number" else 4096)
    store = ResponseStore(tmp_path, max_bytes=3000 if limit == "bytes" else 1 << 20, ttl_s=1e9)
    kept = [(b"first", f"f{number}") for number in range(3)]
    for number, (owner, name) in enumerate(kept):
        assert store.put(owner, body(name, 200), [])
        os.utime(store._path(owner, name), (1e9 + number, 1e9 + number))  # older than all that comes
    for number in range(30):
        assert store.put(b"greedy", body(f"g{number}", 200), [])
        os.utime(store._path(b"greedy", f"g{number}"), (1.5e9 + number, 1.5e9 + number))
    assert all(store.get(*one) for one in kept) and store.get(b"greedy", "g29") and not store.get(b"greedy", "g0")
    assert store.put(b"second", body("s0", 200), []) and all(store.get(*one) for one in [*kept, (b"second", "s0")])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3000 or limit == "number"


def test_the_folder_is_looked_through_once_in_many_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4,000 answers kept, a look at each new one took 40 ms of the interpreter, which the event loop needs."""
    looks = []
    found = ResponseStore._found
    monkeypatch.setattr(ResponseStore, "_found", lambda store: looks.append(1) or found(store))
    monkeypatch.setattr(store_module, "MAX_STORED_RESPONSES", 320)
    stores = [ResponseStore(tmp_path, 1 << 20, 60, num_workers=2) for _ in range(2)]
    for number in range(800):
        assert stores[number % 2].put(b"me", body(f"r{number}"), [])
        assert number % 50 or len(list(tmp_path.iterdir())) <= 320
    assert len(looks) <= 800 / 10 and stores[0].get(b"me", "r799") and not stores[0].get(b"me", "r0")
    num_looks = len(looks)
    for number in range(60):  # 1 MiB has room for 52 of them
        assert stores[number % 2].put(b"me", body(f"l{number}", 20_000), [])
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1 << 20
    assert len(looks) - num_looks < 60


def test_what_a_request_may_load_is_bounded_by_the_bodies_together() -> None:
    options = GatewayOptions()
    most = options.max_concurrent_requests * store_module.MAX_STORED_RESPONSE_BYTES
    assert most <= options.max_total_body_bytes


def test_an_answer_that_cannot_be_written_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gateway" / "responses"
    store = ResponseStore(folder, 1 << 20, 60)
    assert store.put(b"me", body("a"), []) and store.get(b"me", "a"), "a folder that was removed is made again"
    assert folder.stat().st_mode & 0o777 == 0o700

    def fill(path: Path, data: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    assert not store.put(b"me", body("b"), []) and not store.put(b"me", body("c"), [])
    assert len(list(folder.iterdir())) == 1, "no part of a file is left"
    assert [record.message.count("No space left") for record in caplog.records] == [1], "said once"


def test_the_store_knows_whose_an_answer_is(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path, 1 << 20, 60)
    store.put(b"me", body("../../x"), [{"role": "user"}])
    assert [path.parent for path in tmp_path.rglob("*")] == [tmp_path], "an id is no path"
    assert store.get(b"you", "../../x") is None and not store.delete(b"you", "../../x")
    assert store.get(b"me", "../../x")["messages"] == [{"role": "user"}]
    assert store.delete(b"me", "../../x") and store.get(b"me", "../../x") is None
    assert not ResponseStore(None, 1 << 20, 60).put(b"", body("a"), [])
