"""The gateway before a scripted Triton: tools in every format, keys, faults, embeddings, models that come and go."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import openai
import pytest
from fake_triton import FakeTriton
from gateway import GatewayProcess
from patience import PATIENCE_S, wait_until
from slipstream.server.catalog import Catalog
from slipstream.server.options import GatewayOptions

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
HERMES = ["Let me see.\n<tool", '_call>\n{"name": "f", "argum', 'ents": {"a": [1, "}"]}}\n</tool_call', ">"]
LLAMA = ['{"name": "f", "para', 'meters": {"a": [1, "}"]}}']
MISTRAL = ["[TOOL_", 'CALLS][{"name": "f", "arguments": {"a": [1, "}"]}}]']
MISTRAL_V11 = ["[TOOL_CALLS]", "f", "[ARGS]", '{"a": [1, ', '"}"]}']


def ask(client: openai.OpenAI, model: str, script: dict[str, object], **options: object) -> object:
    messages = [{"role": "user", "content": json.dumps(script)}]
    return client.chat.completions.create(model=model, messages=messages, **options)


@pytest.mark.parametrize(
    ("model", "pieces", "content"),
    [
        ("hermes", HERMES, "Let me see."),
        ("llama3", LLAMA, None),
        ("mistral", MISTRAL, None),
        ("mistral", MISTRAL_V11, None),
    ],
)
def test_tool_calls(fake_client: openai.OpenAI, model: str, pieces: list[str], content: str | None) -> None:
    choice = ask(fake_client, model, {"pieces": pieces}, tools=TOOLS).choices[0]
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"a": [1, "}"]})
    assert choice.message.content == content and choice.finish_reason == "tool_calls"
    assert len(call.id) == (9 if model == "mistral" else 29)
    text, arguments, names = "", "", []
    for chunk in ask(fake_client, model, {"pieces": pieces}, tools=TOOLS, stream=True):
        text += chunk.choices[0].delta.content or ""
        for part in chunk.choices[0].delta.tool_calls or []:
            names += [part.function.name] if part.function.name else []
            arguments += part.function.arguments or ""
        reason = chunk.choices[0].finish_reason
    assert (text or None, names, json.loads(arguments), reason) == (content, ["f"], {"a": [1, "}"]}, "tool_calls")


def test_ids_that_the_model_writes(fake_client: openai.OpenAI) -> None:
    script = {"pieces": ["[TOOL_CALLS]", "f", "[CALL_ID]", "abc123def", "[ARGS]", "{}"]}
    [call] = ask(fake_client, "mistral", script, tools=TOOLS).choices[0].message.tool_calls
    assert (call.id, call.function.name, call.function.arguments) == ("abc123def", "f", "{}")
    chunks = ask(fake_client, "mistral", script, tools=TOOLS, stream=True)
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert (parts[0].id, parts[0].function.name) == ("abc123def", "f")


def test_plain_text_with_tools_at_hand(fake_client: openai.OpenAI) -> None:
    for model in ("hermes", "llama3", "mistral"):
        choice = ask(fake_client, model, {"pieces": ["1 < 2, ", "so [TOOL] it is"]}, tools=TOOLS).choices[0]
        assert choice.message.content == "1 < 2, so [TOOL] it is" and choice.message.tool_calls is None


def test_marks_are_asked_for_only_where_they_are_special(fake_client: openai.OpenAI, fake_triton: FakeTriton) -> None:
    for model, expected in (("mistral", False), ("hermes", None)):
        ask(fake_client, model, {"pieces": ["x"]}, tools=TOOLS)
        assert fake_triton.sampling[-1].get("skip_special_tokens") is expected


def test_a_conversation_with_calls_reaches_the_template(fake_client: openai.OpenAI) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "x", "content": '{"pieces": ["done"]}'},
    ]
    answer = fake_client.chat.completions.create(model="hermes", messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == "done"
    messages[1]["tool_calls"][0]["function"]["arguments"] = "{broken"
    with pytest.raises(openai.BadRequestError, match=r"messages\[1\].tool_calls\[0\].function.arguments: is not JSON"):
        fake_client.chat.completions.create(model="hermes", messages=messages, tools=TOOLS)


@pytest.mark.parametrize(
    ("fault", "error", "code"),
    [
        (["INVALID_ARGUMENT", "top_k: got -7, accepted: ..."], openai.BadRequestError, None),
        (
            ["INVALID_ARGUMENT", "prompt: has 600 tokens, accepted: ..."],
            openai.BadRequestError,
            "context_length_exceeded",
        ),
        (
            ["UNAVAILABLE", "4 requests are waiting; max_waiting_requests=4"],
            openai.RateLimitError,
            "rate_limit_exceeded",
        ),
        (["UNAVAILABLE", "this has 9 more; max_total_request_bytes=9"], openai.RateLimitError, "rate_limit_exceeded"),
        (["UNAVAILABLE", "the engine was killed; it is being restarted"], openai.InternalServerError, "unavailable"),
        (["INTERNAL", "a bug"], openai.InternalServerError, "internal_error"),
        (["", "top_k: got -7, accepted: ... [INVALID_ARG]"], openai.BadRequestError, None),
        (["", "nonsense: unknown sampling parameter; did you mean [INVALID_ARG]"], openai.BadRequestError, None),
        (
            ["", "prompt: has 600 tokens, accepted: ... [INVALID_ARG]"],
            openai.BadRequestError,
            "context_length_exceeded",
        ),
        (["", "4 requests wait; max_waiting_requests=4 [UNAVAILABLE]"], openai.RateLimitError, "rate_limit_exceeded"),
        (["", "too many grammars are being compiled [UNAVAILABLE]"], openai.InternalServerError, "unavailable"),
        (["", "the request has 2000 parameters, accepted: ... [INVALID_ARG]"], openai.BadRequestError, None),
        (
            ["", "the engine of model 'llm' was killed; it is being restarted [UNAVAILABLE]"],
            openai.InternalServerError,
            "unavailable",
        ),
        (["", "the model is being unloaded [UNAVAILABLE]"], openai.InternalServerError, "unavailable"),
        (["", "Request for unknown model: 'x' is not found"], openai.NotFoundError, "model_not_found"),
        (["", "Request for unknown model: 'x' has no available versions"], openai.InternalServerError, "unavailable"),
        (["", "KeyError: 'x'"], openai.InternalServerError, "internal_error"),
    ],
)
def test_faults_before_the_first_token(
    fake_client: openai.OpenAI, fault: list[str], error: type[openai.APIStatusError], code: str | None
) -> None:
    for stream in (False, True):
        with pytest.raises(error) as caught:
            ask(fake_client, "plain", {"pieces": [], "fail": fault}, stream=stream)
        words = fault[1].partition(" [")[0].removeprefix("prompt: ")  # a chat's prompt is its messages
        assert caught.value.code == code and words in caught.value.message
        assert "[" not in caught.value.message.partition("accepted")[2], "the code is told by the status"
        assert caught.value.status_code != 503 or caught.value.response.headers["retry-after"]


def test_a_fault_in_mid_stream_is_an_event(fake_client: openai.OpenAI) -> None:
    stream = ask(fake_client, "plain", {"pieces": ["a", "b"], "fail": ["UNAVAILABLE", "the engine died"]}, stream=True)
    text = ""
    with pytest.raises(openai.APIError, match="the engine died"):
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == "ab"


def test_going_away_cancels_early_and_late(fake_client: openai.OpenAI, fake_triton: FakeTriton) -> None:
    fake_triton.cancelled.clear()
    with pytest.raises(openai.APITimeoutError):
        ask(fake_client, "plain", {"pieces": [], "hang": True}, stream=True, timeout=1.5)
    assert fake_triton.cancelled.wait(PATIENCE_S)
    fake_triton.cancelled.clear()
    stream = ask(fake_client, "plain", {"pieces": ["a"], "hang": True}, stream=True)
    next(iter(stream))
    assert not fake_triton.cancelled.wait(0.2)
    stream.close()
    assert fake_triton.cancelled.wait(PATIENCE_S)


@pytest.mark.parametrize("stream", [True, False])
def test_half_a_surrogate_leaves_no_stream_behind(
    fake_gateway: GatewayProcess, fake_triton: FakeTriton, stream: bool
) -> None:
    """It is found only when the prompt is written for Triton; streams counted for ever make all others coarse."""
    chat = {"model": "plain", "messages": [{"role": "user", "content": "{}"}], "stream": stream}
    body = json.dumps({**chat, "chat_template_kwargs": {"extra": "\ud800"}}).encode()
    num_requests = len(fake_triton.requests)
    headers = {"Authorization": "Bearer sk-right", "content-type": "application/json"}
    for _ in range(3):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(urllib.request.Request(f"{fake_gateway.url}/v1/chat/completions", body, headers))
        assert error.value.code == 400 and "valid Unicode" in json.loads(error.value.read())["error"]["message"]
    time.sleep(0.6)  # the count is told four times a second; one that is wrong stays so
    wait_until(lambda: fake_gateway.metrics()["slipstream_gateway_streams_in_flight"] == 0, "no stream to be counted")
    assert len(fake_triton.requests) == num_requests


def test_a_client_that_never_reads(fake_gateway: GatewayProcess, fake_triton: FakeTriton) -> None:
    """Its answer fills every buffer between; then it is cut off, and the request, which goes on, is cancelled."""
    fake_triton.cancelled.clear()
    script = {"pieces": ["x" * 1000], "repeat": 20_000, "hang": True}
    body = json.dumps({"model": "plain", "prompt": json.dumps(script), "stream": True})
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", fake_gateway.port))
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"authorization: Bearer sk-right\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body.encode())
        assert fake_triton.cancelled.wait(PATIENCE_S)


@pytest.mark.parametrize("key", ["", "sk-wrong", "sk-righ", "sk-rightx", "sk-right\u00e9"])
def test_wrong_keys(fake_gateway: GatewayProcess, key: str) -> None:
    for path in ("/v1/models", "/v1/chat/completions", "/v1//models", "/docs"):
        request = urllib.request.Request(fake_gateway.url + path, headers={"Authorization": f"Bearer {key}"})
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request)
        body = json.loads(error.value.read())
        assert error.value.code == 401 and body["error"]["code"] == "invalid_api_key"
        assert "sk-right" not in body["error"]["message"].replace(key, "")


def test_right_keys_and_open_paths(fake_gateway: GatewayProcess) -> None:
    for key in ("sk-right", "sk-also"):
        assert openai.OpenAI(base_url=f"{fake_gateway.url}/v1", api_key=key).models.list().data
    assert [fake_gateway.get(path)[0] for path in ("/health", "/ready", "/metrics", "/", "/page/app.js")] == [200] * 5


def test_models_in_every_state(fake_client: openai.OpenAI) -> None:
    cards = fake_client.models.list().data
    assert {model.id for model in cards if model.task == "embedding"} == {"encoder", "batched_encoder"}
    names = {model.id for model in cards if model.task != "embedding"}
    generating = {"hermes", "mistral", "llama3", "plain", "guarded", "blocking", "bare", "broken"}
    assert names == generating | {"thinking", "pondering", "harmony"}, "no encoders, nothing that loads"
    for name, status, words in (
        ("loading", 503, "not ready: loading"),
        ("dead", 503, "no weights"),
        ("gone", 404, "does not exist"),
        ("bare", 400, "--checkpoint"),
        ("broken", 400, "chat template cannot be used"),
    ):
        with pytest.raises(openai.APIStatusError) as error:
            ask(fake_client, name, {})
        assert error.value.status_code == status and words in error.value.message
    assert fake_client.completions.create(model="bare", prompt='{"pieces": ["ok"]}').choices[0].text == "ok"


def test_verdicts_of_a_guarded_model(fake_client: openai.OpenAI) -> None:
    script = {"pieces": ["a", "b"], "reason": "content_filter"}
    verdict = {"flagged": True, "categories": ["violence"]}
    whole = ask(fake_client, "guarded", script)
    assert whole.safety == verdict and whole.choices[0].finish_reason == "content_filter"
    chunks = list(ask(fake_client, "guarded", script, stream=True))
    assert [chunk.safety for chunk in chunks if hasattr(chunk, "safety")] == [verdict]
    assert chunks[-1].choices[0].finish_reason == "content_filter"
    assert not hasattr(ask(fake_client, "guarded", {"pieces": ["fine"]}), "safety")


def test_a_model_that_blocks(fake_client: openai.OpenAI) -> None:
    """As `guarded` of the model repository, words of its own for the verdict; and no count of tokens."""
    script = {"pieces": ["a", "b"], "reason": "blocked", "blocked": ["answer", "violence", "hate"]}
    verdict = {"flagged": True, "reason": "answer", "categories": ["violence", "hate"]}
    whole = ask(fake_client, "blocking", script)
    choice = whole.choices[0]
    assert (whole.safety, choice.message.content, choice.finish_reason) == (verdict, "ab", "content_filter")
    assert whole.usage is None, "not counted is not zero"
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask(fake_client, "blocking", script, stream=True, stream_options=options))
    assert [chunk.safety for chunk in chunks if hasattr(chunk, "safety")] == [verdict]
    assert chunks[-1].choices[0].finish_reason == "content_filter" and not any(chunk.usage for chunk in chunks)
    fine = ask(fake_client, "blocking", {"pieces": ["fine"]})
    assert fine.choices[0].finish_reason == "stop" and not hasattr(fine, "safety")
    text = fake_client.completions.create(model="blocking", prompt=json.dumps(script))
    assert (text.choices[0].text, text.choices[0].finish_reason, text.usage) == ("ab", "content_filter", None)
    no_judge = {"pieces": [""], "reason": "blocked", "blocked": ["encoder_failure"]}
    assert ask(fake_client, "blocking", no_judge).safety["reason"] == "encoder_failure"


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [({"n": 2}, "n", "accepted: 1"), ({"logprobs": 1}, "logprobs", "no output"), ({"prompt": [1]}, "prompt", "text")],
)
def test_what_a_model_does_not_declare(
    fake_client: openai.OpenAI, change: dict[str, object], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as error:
        fake_client.completions.create(**{"model": "blocking", "prompt": "{}", **change})
    assert error.value.param == param


def test_too_many_at_once(fake_triton: FakeTriton) -> None:
    fake_triton.cancelled.clear()
    with GatewayProcess(fake_triton.url, ["--max-concurrent-requests", "2", "--no-page"]) as small:
        client = openai.OpenAI(base_url=f"{small.url}/v1", api_key="x", max_retries=0, timeout=120)
        unfinished = [socket.create_connection(("127.0.0.1", small.port)) for _ in range(5)]
        for connection in unfinished:  # a body that does not come takes no place
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{")
        held = [ask(client, "plain", {"pieces": ["a"], "hang": True}, stream=True) for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as error:
            ask(client, "plain", {})
        assert error.value.response.headers["retry-after"] == "1" and "accepted: 2" in error.value.message
        unfinished[0].sendall(b"}" * 8)
        assert unfinished[0].recv(4096).startswith(b"HTTP/1.1 429")
        assert client.models.list().data and small.get("/")[0] == 404, "only what generates is counted; no page"
        held[0].close()

        def is_served() -> bool:
            with contextlib.suppress(openai.RateLimitError):
                return ask(client, "plain", {"pieces": ["room"]}).choices[0].message.content == "room"
            return False

        wait_until(is_served, "room for one more")
        held[1].close()
        for connection in unfinished:
            connection.close()


def test_a_model_that_was_there_a_moment_ago(fake_triton: FakeTriton) -> None:
    fake_triton.models["brief"] = dict(fake_triton.models["plain"])
    with GatewayProcess(fake_triton.url) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0, timeout=120)
        assert ask(client, "brief", {"pieces": ["x"]}).choices
        del fake_triton.models["brief"]
        fake_triton.states["brief"] = ("UNAVAILABLE", "unloaded")
        time.sleep(0.3)
        client.models.list()  # asks Triton again
        with pytest.raises(openai.InternalServerError, match="perhaps to be restarted") as error:
            ask(client, "brief", {})
        assert error.value.status_code == 503
    del fake_triton.states["brief"]


def test_embeddings(fake_client: openai.OpenAI, fake_gateway: GatewayProcess) -> None:
    answer = fake_client.embeddings.create(model="encoder", input=["a b c", "four"])  # the client asks for base64
    assert [entry.embedding for entry in answer.data] == [[5.0, 2.0, 0.5], [4.0, 0.0, 0.5]]
    raw = fake_client.embeddings.with_raw_response.create(model="encoder", input="x", encoding_format="base64")
    vector = np.frombuffer(base64.b64decode(json.loads(raw.text)["data"][0]["embedding"]), np.float32)
    assert vector.tolist() == [1.0, 0.0, 0.5]
    texts = ["x" * length for length in range(1, 21)]  # the model takes eight at once
    many = fake_client.embeddings.create(model="batched_encoder", input=texts)
    assert [entry.embedding[0] for entry in many.data] == list(range(1, 21))
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        fake_client.embeddings.create(model="encoder", input="x", dimensions=2)
    with pytest.raises(openai.NotFoundError):
        fake_client.embeddings.create(model="plain", input="x")


def test_texts_are_ranked_by_their_embeddings(fake_client: openai.OpenAI) -> None:
    """A vector is (length, spaces, 0.5): a text with as many spaces per character is nearest."""

    def post(path: str, **body: object) -> dict:
        return fake_client.post(path, cast_to=dict, body={"model": "encoder", **body})

    documents = ["aaaa", "a b c", {"text": "a b cd"}]
    ranked = post("/rerank", query="x y z", documents=documents, top_n=2)
    assert [result["index"] for result in ranked["results"]] == [1, 2]
    assert ranked["results"][0]["relevance_score"] == pytest.approx(1.0)
    assert ranked["results"][1]["document"] == {"text": "a b cd"}
    scored = post("/score", text_1="x y z", text_2=["a b c", "aaaa"])["data"]
    assert [entry["index"] for entry in scored] == [0, 1] and scored[0]["score"] == pytest.approx(1.0)
    assert 0 < scored[1]["score"] < scored[0]["score"]
    pairs = post("/score", text_1=["a b c", "aaaa"], text_2=["a b c", "aaaa"])["data"]
    assert [entry["score"] for entry in pairs] == pytest.approx([1.0, 1.0])
    for path, body, words in (
        ("/rerank", {"query": "a", "documents": []}, "at least 1"),
        ("/rerank", {"query": "", "documents": ["a"]}, "has an empty text"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "has 2 texts, accepted: 1 text, or 3"),
        ("/score", {"text_1": "a", "text_2": ["a"] * 1025}, "at most 1024"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            post(path, **body)


def test_workers_share_their_counts(fake_gateway: GatewayProcess) -> None:
    name = 'slipstream_gateway_requests_total{endpoint="other",status="200"}'

    def look() -> float:
        """Itself a request, which the next look counts; a request is counted when its answer has left."""
        return fake_gateway.metrics()[name]

    made = itertools.count(look() + 9)
    for _ in range(8):
        fake_gateway.get("/health")
    wait_until(lambda: look() >= next(made), "whichever worker answers to know all")
    wait_until(lambda: look() + 1 == look(), "each to be counted once")


def test_where_the_checkpoint_lies(tmp_path: Path) -> None:
    """config.pbtxt's paths count from the model's folder; what the command line says comes first."""
    folders = {name: tmp_path / name for name in ("models/a", "repository/llm", "given")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    (folders["models/a"] / "tokenizer.json").touch()
    found = [
        Catalog(GatewayOptions(**options), link=None)._folder("llm", {"model": model})
        for options, model in (
            ({}, "../../models/a"),
            ({"model_repository": tmp_path / "repository"}, "../../models/a"),
            ({"model_repository": tmp_path / "repository"}, "../../models/none"),
            ({"checkpoints": {"": folders["given"]}}, "org/never-downloaded"),
            ({"checkpoints": {"llm": folders["given"]}}, str(folders["models/a"])),
            ({}, str(folders["models/a"] / "tokenizer.json")),
        )
    ]
    here = folders["models/a"]
    assert found == [None, here, None, folders["given"], folders["given"], here]
