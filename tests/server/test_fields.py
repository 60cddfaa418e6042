"""Fields that the gateway does not know or serve, the ids of requests, and the line that each leaves in the log."""

from __future__ import annotations

import http.client
import json
import logging
import socket
from argparse import Namespace

import grpc
import openai
import pytest
from fake_triton import FakeTriton
from gateway import GatewayProcess
from patience import PATIENCE_S, wait_until
from slipstream.commands.serve import check_ports
from slipstream.core.errors import ConfigError
from slipstream.server.errors import ApiError, from_grpc
from slipstream.server.messages.schemas import MessagesRequest
from slipstream.server.request_log import JsonFormatter, RequestRecord, TextFormatter
from slipstream.server.responses.input import to_chat as responses_chat
from slipstream.server.responses.schemas import ResponsesRequest
from slipstream.server.sampling import guide_of, naming_fields_as_asked
from slipstream.server.schemas import ChatRequest, CompletionRequest
from slipstream.server.serve import listen
from slipstream.server.unknown_fields import NOT_SERVED, unknown_fields, warning

SCRIPT = json.dumps({"pieces": ["Hel", "lo"]})
CHAT = {"model": "plain", "messages": [{"role": "user", "content": SCRIPT}]}
TOOL = {"type": "function", "function": {"name": "f", "x-vendor": 1}}


def request(**fields: object) -> ChatRequest:
    return ChatRequest.model_validate({**CHAT, **fields})


def test_unknown_fields_are_named_with_what_was_perhaps_meant() -> None:
    body = request(temprature=1, zzz={"a": 1}, tools=[TOOL], response_format={"type": "text", "b": 2})
    fields = unknown_fields(body, is_strict=False)
    assert fields == ["temprature", "zzz", "response_format.b", "tools[0].function.x-vendor"]
    told = warning(body, fields)
    assert told.startswith(
        "ignored parameters: temprature (did you mean temperature?), zzz, response_format.b, tools[0]"
    )
    with pytest.raises(ApiError) as refused:
        unknown_fields(body, is_strict=True)
    assert refused.value.param == "temprature" and "(did you mean temperature?) (--strict)" in refused.value.message
    assert unknown_fields(request(user="x", prompt_cache_key="y"), is_strict=True) == []
    nulls = request(temprature=None, response_format={"type": "text", "b": None}, tools=[{**TOOL, "cache": None}])
    assert unknown_fields(nulls, is_strict=False) == ["tools[0].function.x-vendor"], "null is as good as none"


def test_a_header_of_any_names_is_short_and_plain() -> None:
    body = request(**{'a"\r\nset-cookie: x': 1, "é" * 5000: 2, **{f"n{i}": i for i in range(2000)}})
    told = warning(body, unknown_fields(body, is_strict=False))
    assert len(told) < 1600 and told.isascii() and told.isprintable() and '"' not in told
    assert told.endswith(", 1986 more")


@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_would_change_the_answer_is_refused_with_the_reason(name: str) -> None:
    neutral, reason = NOT_SERVED[name]
    for value in (None, *neutral):
        assert unknown_fields(request(**{name: value}), is_strict=True) == []
    with pytest.raises(ApiError, match=f"{name}: not served, because {reason}; accepted: ") as refused:
        unknown_fields(request(**{name: ["other"]}), is_strict=False)
    assert (refused.value.status_code, refused.value.param) == (400, name)


def test_a_field_of_another_server_does_not_stop_a_request(fake_client: openai.OpenAI) -> None:
    extra = {"temprature": 1, "vllm_xargs": {"a": 1}}
    raw = fake_client.chat.completions.with_raw_response.create(**CHAT, extra_body=extra)
    assert raw.parse().choices[0].message.content == "Hello"
    ignored = "ignored parameters: temprature (did you mean temperature?), vllm_xargs"
    assert raw.headers["warning"] == f'299 slipstream "{ignored}"'
    assert "warning" not in fake_client.chat.completions.with_raw_response.create(**CHAT).headers
    with pytest.raises(openai.BadRequestError, match="audio: not served, because this is a text model"):
        fake_client.chat.completions.create(**CHAT, extra_body={"audio": {"voice": "alloy"}})


def test_one_id_names_a_request_everywhere(
    fake_client: openai.OpenAI, fake_triton: FakeTriton, fake_gateway: GatewayProcess
) -> None:
    """In the header, in the answer, in the log and in the engine."""
    raw = fake_client.chat.completions.with_raw_response.create(**CHAT)
    own = raw.headers["x-request-id"]
    assert raw.parse().id == f"chatcmpl-{own}" and fake_triton.requests[-1].id == own
    given = fake_client.chat.completions.with_raw_response.create(**CHAT, extra_body={"request_id": "job-7"})
    assert given.headers["x-request-id"] == fake_triton.requests[-1].id == "job-7"
    prompts = [SCRIPT, SCRIPT]
    header = {"x-request-id": "batch/1"}
    many = fake_client.completions.with_raw_response.create(model="plain", prompt=prompts, extra_headers=header)
    assert many.headers["x-request-id"] == "batch/1" and many.parse().id == "cmpl-batch/1"
    assert {request.id for request in fake_triton.requests[-2:]} == {"batch/1-0", "batch/1-1"}
    forged = {"x-request-id": "a b\tc"}
    answer = fake_client.chat.completions.with_raw_response.create(**CHAT, extra_headers=forged)
    assert " " not in answer.headers["x-request-id"]
    wait_until(lambda: "id=batch/1 " in fake_gateway.log, "the last of these to be logged")


def line_of(gateway: GatewayProcess, request_id: str) -> dict[str, str]:
    """The values of a request's line."""
    wait_until(lambda: f" id={request_id} " in gateway.log, "the line")
    [line] = [line for line in gateway.log.splitlines() if f" id={request_id} " in line]
    assert " INFO slipstream.server.request_log: request " in line
    return dict(part.split("=", 1) for part in line.split("request ", 1)[1].split(" ") if "=" in part)


def test_each_request_leaves_one_line(fake_client: openai.OpenAI, fake_gateway: GatewayProcess) -> None:
    fake_client.chat.completions.create(**CHAT, extra_body={"request_id": "whole-1"})
    told = line_of(fake_gateway, "whole-1")
    assert float(told.pop("first_byte_ms")) <= float(told.pop("total_ms")) < 60_000
    assert told.pop("key")
    assert told == {"id": "whole-1", "method": "POST", "path": "/v1/chat/completions", "status": "200"} | {
        "model": "plain", "prompt_tokens": "5", "output_tokens": "1", "end": "stop"
    }  # fmt: skip
    list(fake_client.chat.completions.create(**CHAT, stream=True, extra_body={"request_id": "stream-1"}))
    told = line_of(fake_gateway, "stream-1")
    assert (told["stream"], told["output_tokens"], told["end"]) == ("true", "2", "stop")
    failing = json.dumps({"pieces": ["a", "b"], "fail": ["", "it broke\nINFO forged"]})
    messages = [{"role": "user", "content": failing}]
    with pytest.raises(openai.APIError):
        list(
            fake_client.chat.completions.create(
                model="plain", messages=messages, stream=True, extra_body={"request_id": "broken-1"}
            )
        )
    told = line_of(fake_gateway, "broken-1")
    assert told["end"] == "error" and told["error"].startswith('"it') and "\nINFO forged" not in fake_gateway.log
    with pytest.raises(openai.NotFoundError):
        fake_client.chat.completions.create(**{**CHAT, "model": "no"}, extra_body={"request_id": "none-1"})
    assert line_of(fake_gateway, "none-1")["status"] == "404"


def test_the_log_says_once_what_is_served_where(fake_gateway: GatewayProcess) -> None:
    begins = f"ready: {fake_gateway.url}/v1 serves "  # errors of other tests' models say "not ready: "
    wait_until(lambda: begins in fake_gateway.log, "the line")
    [line] = [line for line in fake_gateway.log.splitlines() if begins in line]
    assert "plain (chat)" in line
    assert "bare (completions)" in line and "encoder (embedding)" in line and "chat page at " in line


def test_a_port_that_is_taken_is_named(fake_gateway: GatewayProcess) -> None:
    with pytest.raises(ConfigError) as refused:
        listen("127.0.0.1", fake_gateway.port)
    assert str(refused.value).startswith(f"port={fake_gateway.port}: cannot listen on 127.0.0.1:{fake_gateway.port}: ")
    asked = Namespace(host="127.0.0.1", http_port=0, grpc_port=fake_gateway.port, metrics_port=0, openai_port=None)
    with pytest.raises(ConfigError, match=f"--grpc-port={fake_gateway.port}: cannot listen on .*accepted: a free port"):
        check_ports(asked)


def test_a_client_that_leaves_is_told_from_an_end(fake_client: openai.OpenAI, fake_gateway: GatewayProcess) -> None:
    messages = [{"role": "user", "content": json.dumps({"pieces": ["a", "b"], "hang": True})}]
    asked = {"model": "plain", "messages": messages, "stream": True, "extra_body": {"request_id": "left-1"}}
    stream = fake_client.chat.completions.create(**asked)
    next(iter(stream))
    stream.close()
    told = line_of(fake_gateway, "left-1")
    assert (told["status"], told["end"]) == ("200", "client_gone")


def test_a_client_that_leaves_before_a_whole_answer_is_no_error(
    fake_gateway: GatewayProcess, fake_triton: FakeTriton
) -> None:
    prompt = json.dumps({"pieces": ["a"], "hang": True})
    body = json.dumps({"model": "plain", "prompt": prompt, "request_id": "left-2"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"authorization: Bearer sk-right\r\n"
    num_before = len(fake_triton.requests)
    with socket.create_connection(("127.0.0.1", fake_gateway.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: len(fake_triton.requests) > num_before, "the generation")
    with socket.create_connection(("127.0.0.1", fake_gateway.port), timeout=PATIENCE_S) as connection:
        head += b"x-request-id: left-3\r\n"
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body[:-1])
    for name in ("left-2", "left-3"):
        told = line_of(fake_gateway, name)
        assert (told["status"], told["end"], told.get("error")) == ("499", "client_gone", None)


def test_load_balancers_may_ask_for_heads(fake_gateway: GatewayProcess) -> None:
    for path in ("/health", "/ready"):
        connection = http.client.HTTPConnection("127.0.0.1", fake_gateway.port, timeout=PATIENCE_S)
        connection.request("HEAD", path)
        reply = connection.getresponse()
        assert (reply.status, reply.read()) == (200, b"")
        connection.close()


def test_a_line_is_text_or_json() -> None:
    record = RequestRecord("POST", "/v1/x y", request_id="r", model='a"b' + "c" * 500, status=200, end="stop")
    entry = logging.makeLogRecord({"name": "n", "levelname": "INFO", "msg": "request", "fields": record.fields()})
    text = TextFormatter().format(entry)
    assert 'path="/v1/x y"' in text and "model=" in text and len(text) < 500 and "\n" not in text
    body = json.loads(JsonFormatter().format(entry))
    assert (body["level"], body["message"], body["id"], body["status"]) == ("INFO", "request", "r", 200)
    assert len(body["model"]) == 200 and "prompt_tokens" not in body


def test_completions_have_the_same_rules() -> None:
    body = CompletionRequest.model_validate({"model": "m", "prompt": "x", "guidance": 1})
    assert unknown_fields(body, is_strict=False) == ["guidance"]


@pytest.mark.parametrize("strict", [None, True, False])
def test_keywords_that_cannot_be_enforced_are_left_to_the_model_where_strict_is_false(strict: bool | None) -> None:
    tags = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    expected = tags if strict is not False else {"type": "array", "items": {"type": "integer"}}
    asked = {"name": "x", "schema": tags, "strict": strict}
    chat = request(response_format={"type": "json_schema", "json_schema": asked})
    body = {"model": "llm", "input": "x", "text": {"format": {"type": "json_schema", **asked}}}
    answer = responses_chat(ResponsesRequest.model_validate(body), [])
    assert guide_of(chat.response_format) == guide_of(answer.response_format) == {"json": expected}


@pytest.mark.parametrize(
    ("fields", "ours", "theirs"),
    [
        ({"max_completion_tokens": 5}, "max_tokens", "max_completion_tokens"),
        ({"max_tokens": 5}, "max_tokens", "max_tokens"),
        ({"logprobs": True, "top_logprobs": 5}, "logprobs", "top_logprobs"),
        ({"logprobs": True}, "logprobs", "logprobs"),
        ({"guided_regex": "["}, "guided_decoding_guide", "guided_regex"),
        ({"structured_outputs": {"regex": "["}}, "guided_decoding_guide", "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "guided_decoding_guide", "response_format"),
        ({"response_format": {"type": "text"}, "tools": [TOOL]}, "guided_decoding_guide", "tools"),
        ({"functions": [TOOL["function"]]}, "guided_decoding_guide", "functions"),
    ],
)
def test_errors_of_the_engine_name_what_the_client_sent(fields: dict[str, object], ours: str, theirs: str) -> None:
    with pytest.raises(ApiError) as refused, naming_fields_as_asked(request(**fields)):
        raise from_grpc(grpc.StatusCode.INVALID_ARGUMENT, f"{ours}: got 5, accepted: {ours} of another kind")
    assert refused.value.param == theirs
    assert refused.value.message == f"{theirs}: got 5, accepted: {ours} of another kind"


SCHEMA_OF_TEXT = {"format": {"type": "json_schema", "name": "x", "schema": {}}}
SCHEMA_OF_OUTPUT = {"format": {"type": "json_schema", "schema": {}}}


@pytest.mark.parametrize(
    ("fields", "ours", "theirs"),
    [
        ({"prompt": "x"}, "text_input", "prompt"),
        ({"messages": [{"role": "user", "content": "x"}]}, "prompt", "messages"),
        ({"input": "x"}, "prompt", "input"),
        ({"input": "x", "max_output_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"input": "x", "text": SCHEMA_OF_TEXT}, "guided_decoding_guide", "text.format"),
        ({"input": "x", "tools": [{"type": "function", "name": "f"}]}, "guided_decoding_guide", "tools"),
        ({"max_tokens": 5}, "max_tokens", "max_tokens"),
        ({"max_tokens": 5, "stop_sequences": ["x"]}, "stop", "stop_sequences"),
        ({"max_tokens": 5, "output_config": SCHEMA_OF_OUTPUT}, "guided_decoding_guide", "output_config.format"),
    ],
)
def test_errors_of_every_api_name_its_fields(fields: dict[str, object], ours: str, theirs: str) -> None:
    kind = MessagesRequest if "max_tokens" in fields else ResponsesRequest if "input" in fields else ChatRequest
    kind = CompletionRequest if "prompt" in fields else kind
    asked = kind.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})
    with pytest.raises(ApiError) as refused, naming_fields_as_asked(asked):
        raise from_grpc(grpc.StatusCode.INVALID_ARGUMENT, f"{ours}: is wrong")
    assert (refused.value.param, refused.value.message) == (theirs, f"{theirs}: is wrong")


@pytest.mark.parametrize(
    "words",
    [
        "prompt: has 600 tokens, accepted: at most 511 (max_model_len=512 less one output token)",
        "text_input: the prompt has 90000 bytes, accepted: at most 2048 (max_model_len=512 tokens of 4 bytes)",
        "text_input: the prompt has more than 512 tokens in the first 900 of its 90000 characters, accepted: at most "
        "511 (max_model_len=512 less one output token)",
    ],
)
def test_a_prompt_that_is_too_long_is_told_as_clients_know_it(words: str) -> None:
    error = from_grpc(grpc.StatusCode.INVALID_ARGUMENT, words)
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert error.message.endswith("The prompt is too long: this model's maximum context length is 512 tokens")
