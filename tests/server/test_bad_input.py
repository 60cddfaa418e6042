"""Whatever a client does wrong: the right status, a text that says what, and nothing left behind in the engine."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import select
import socket
from collections.abc import Iterator

import pytest
from gateway import GatewayProcess
from llm_server import LlmServer
from patience import PATIENCE_S

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GOOD_CHAT = {"model": "llm", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
GOOD = {"model": "llm", "prompt": "x", "max_tokens": 2}
NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}
UNENFORCED = {"type": "array", "items": {"allOf": [{"type": "object"}, {"type": "object"}]}}
LAX_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": UNENFORCED}}
LAX_TOOL = {"type": "function", "function": {"name": "add", "parameters": UNENFORCED}}
BAD_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "nonsense"}}}


@pytest.fixture(scope="module")
def impatient(llm_server: LlmServer) -> Iterator[GatewayProcess]:
    """A gateway of short limits on slow clients; the one that tests share must not take a slow machine for one."""
    with GatewayProcess(llm_server.grpc_url, ["--header-timeout-s", "0.7", "--body-timeout-s", "1"]) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def nothing_leaks(llm_server: LlmServer) -> Iterator[None]:
    yield
    llm_server.wait_idle()


def post(gateway: GatewayProcess, path: str, body: bytes, **headers: str) -> tuple[int, dict]:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
    try:
        connection.request("POST", path, body, {"content-type": "application/json", **headers})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("path", "change", "param", "words"),
    [
        (CHAT, {"model": 7}, "model", "valid string"),
        (CHAT, {"model": "m" * 513}, "model", "at most 512"),
        (CHAT, {"messages": "hi"}, "messages", "valid list"),
        (CHAT, {"messages": []}, "messages", "at least 1"),
        (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role", "is missing"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "text",
        ),
        (CHAT, {"temperature": "hot"}, "temperature", "valid number"),
        (CHAT, {"temperature": -1}, "temperature", "greater than or equal to 0"),
        (CHAT, {"temperature": True}, "temperature", "valid number"),
        (CHAT, {"n": 0}, "n", "greater than or equal to 1"),
        (CHAT, {"n": 10**30}, "n", "less than or equal to 128"),
        (CHAT, {"max_tokens": 1.5}, "max_tokens", "valid integer"),
        (CHAT, {"use_beam_search": True, "n": 2, "min_tokens": 1}, "min_tokens", "accepted with beam search: 0"),
        (CHAT, {"use_beam_search": True, "n": 11}, "beam_width", "at most max_beam_width=10"),
        (CHAT, {"length_penalty": 11}, "length_penalty", "less than or equal to 10"),
        (CHAT, {"tool_choice": "auto"}, "tool_choice", "without tools"),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "match pattern",
        ),
        (CHAT, {"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        (CHAT, {"response_format": NO_SCHEMA}, "response_format", "not a usable json_schema"),
        (COMPLETIONS, {"response_format": NO_SCHEMA}, "response_format", "not a usable json_schema"),
        (CHAT, {"structured_outputs": {"json": {"type": "zzz"}}}, "structured_outputs", "not a usable json_schema"),
        (
            CHAT,
            {"structured_outputs": {"choice": []}},
            "structured_outputs.choice",
            "structured_outputs.choice: got []",
        ),
        (COMPLETIONS, {"structured_outputs": {"regex": ""}}, "structured_outputs", "structured_outputs: not a usable"),
        (CHAT, {"guided_choice": []}, "guided_choice", "guided_choice: got []"),
        (COMPLETIONS, {"guided_json": {"type": "zzz"}}, "guided_json", "guided_json: not a usable json_schema"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs: got 21"),
        (CHAT, {"tools": [BAD_TOOL], "tool_choice": "required"}, "tools", "not a usable structural_tag"),
        (CHAT, {"response_format": LAX_SCHEMA}, "response_format", "response_format: has allOf at /items/allOf, which"),
        (CHAT, {"tools": [LAX_TOOL], "tool_choice": "required"}, "tools", "at /items/allOf, which cannot"),
        (CHAT, {"structured_outputs": {"regex": r"\Aa"}}, "structured_outputs", r"has \A at character 0"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        (CHAT, {"stop": ["a"] * 65}, "stop", "at most 64"),
        (CHAT, {"logit_bias": {"99999999": 1}}, "logit_bias", "not in the vocabulary"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias", "an integer"),
        (CHAT, {"structured_outputs": {"regex": "["}}, "structured_outputs", "regex"),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 4000}]}, "messages", "tokens"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": []}, "prompt", "at least 1"),
        (COMPLETIONS, {"prompt": [99999999]}, "prompt", "not in the vocabulary"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt", "greater than or equal to 0"),
        (COMPLETIONS, {"prompt": "def " * 3000}, "prompt", "max_model_len"),
        (COMPLETIONS, {"suffix": "end"}, "suffix", "no suffix"),
        (COMPLETIONS, {"best_of": 3}, "best_of", "n=1"),
        (COMPLETIONS, {"speculation": {"nonsense": 1}}, "nonsense", "unknown"),
    ],
)
def test_wrong_values(gateway: GatewayProcess, path: str, change: dict, param: str, words: str) -> None:
    good = GOOD_CHAT if path == CHAT else GOOD
    for stream in (False, True):
        status, body = post(gateway, path, json.dumps({**good, **change, "stream": stream}).encode())
        error = body["error"]
        assert status == 400 and error["type"] == "invalid_request_error", body
        assert words in error["message"], body
        assert error["param"] is None or error["param"].startswith(param.split("[")[0]), body


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "JSON object"),
        (b"{", "not JSON"),
        (b"[]", "JSON object"),
        (b"null", "JSON object"),
        (b'{"model": "llm", "prompt": "\xff"}', "not UTF-8"),
        (b'{"model": "llm", "prompt": "\\ud800"}', "unicode"),
        (b'{"model": "llm", "prompt": "x", "temperature": NaN}', "temperature"),
        (b'{"model": "llm", "prompt": "x", "seed": ' + b"9" * 5000 + b"}", "body"),
        (b"[" * 100_000, "too deeply"),
        (b'{"a":' * 50_000, "body"),
    ],
    ids=["empty", "cut", "list", "null", "bytes", "surrogate", "nan", "huge number", "deep list", "deep object"],
)
def test_malformed_bodies(gateway: GatewayProcess, body: bytes, words: str) -> None:
    status, answer = post(gateway, COMPLETIONS, body)
    assert status == 400 and words in answer["error"]["message"], answer


def test_unknown_places(gateway: GatewayProcess) -> None:
    assert post(gateway, COMPLETIONS, json.dumps({**GOOD, "model": "gpt-9"}).encode())[0] == 404
    status, body = post(gateway, "/v1/completion", b"{}")
    assert status == 404 and body["error"]["code"] == "not_found"
    assert body["error"]["message"] == "There is no /v1/completion here; GET /openapi.json lists the paths"
    refused = json.loads(gateway.get(CHAT)[1])["error"]
    assert refused["code"] == "method_not_allowed"
    assert refused["message"] == "/v1/chat/completions does not take GET; accepted: POST"
    status, body = post(gateway, "/v1/embeddings", b'{"model": "llm", "input": "x"}')
    assert status == 404 and "--embedding-model" in body["error"]["message"]


def test_ten_megabytes(gateway: GatewayProcess) -> None:
    body = json.dumps({**GOOD, "prompt": "x" * 10_000_000}).encode()
    with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
        connection.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        )
        assert b" 413 " in connection.recv(100), "refused by its length, unread"
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
        connection.sendall(head)
        answer = send_until_answered(connection, b"10000\r\n" + b" " * 65536 + b"\r\n", 0.02)
        assert b" 413 " in answer, "refused when it has grown too large"


def send_until_answered(connection: socket.socket, piece: bytes, period_s: float) -> bytes:
    """The first bytes of the answer to one who sends a piece every period_s, at most a thousand of them."""
    for _ in range(1000):
        readable, _, _ = select.select([connection], [], [], period_s)
        if readable:
            break
        with contextlib.suppress(ConnectionError):  # cut off: what was said before can be read
            connection.sendall(piece)
    return connection.recv(1000)


@pytest.mark.parametrize(
    ("sent", "more"),
    [(b"", b""), (b"POST /v1/", b"c"), (b"POST /v1/models HTTP/1.1\r\nhost: localhost\r\nx-a: ", b"b")],
)
def test_slow_headers(impatient: GatewayProcess, sent: bytes, more: bytes) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=PATIENCE_S) as connection:
        connection.sendall(sent)  # and then nothing, or a byte now and then, which does not help
        answer = send_until_answered(connection, more, 0.1) if more else connection.recv(1000)
        assert b" 408 " in answer and b"0.7 s for its headers" in answer
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1000) == b"", "it is closed"


def test_a_slow_body(impatient: GatewayProcess) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=PATIENCE_S) as connection:
        connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500\r\n\r\n{{".encode())
        assert b" 408 " in connection.recv(1000)


def test_a_compressed_body_is_named(gateway: GatewayProcess) -> None:
    body = gzip.compress(json.dumps({"model": "llm", "prompt": "a"}).encode())
    status, answer = post(gateway, COMPLETIONS, body, **{"content-encoding": "gzip"})
    assert status == 415 and "content-encoding: got 'gzip', accepted" in answer["error"]["message"]


CHUNKED_BODY = b"2\r\n{}\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"transfer-encoding: chunked", 400),  # taken: the body lacks the prompt
        (b"transfer-encoding: Chunked ", 400),
        (b"transfer-encoding: gzip, chunked", 501),
        (b"transfer-encoding: gzip\r\ntransfer-encoding: chunked", 501),
        (b"transfer-encoding: identity, chunked", 501),
        (b"transfer-encoding: chunked, chunked", 400),
        (b"transfer-encoding: chunked\r\ntransfer-encoding: chunked", 400),
        (b"transfer-encoding: xchunked", 501),
        (b"transfer-encoding: gzip", 501),
        (b"transfer-encoding: chunked, gzip", 400),  # no chunks at its end, so no end: RFC 9112, 6.3
        (b"transfer-encoding: chunked\r\ncontent-length: 2", 400),
    ],
)
def test_transfer_codings_but_chunked_are_refused(gateway: GatewayProcess, lines: bytes, status: int) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += b"connection: close\r\ncontent-type: application/json\r\n"
    is_taken = lines.lower().strip() == b"transfer-encoding: chunked"
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head + lines + b"\r\n\r\n" + CHUNKED_BODY)
        with connection.makefile("rb") as reader:
            answer = reader.read()
    assert int(answer.split()[1]) == status, answer
    assert (b'"param":"prompt"' in answer) == is_taken, answer
    if status == 501:
        assert b"accepted: chunked" in answer


def test_http_that_is_none(gateway: GatewayProcess) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=PATIENCE_S) as connection:
        connection.sendall(b"\x16\x03\x01\x00\xf0 hello\r\n\r\n")
        assert b" 400 " in connection.recv(1000)
    assert gateway.get("/health")[0] == 200
