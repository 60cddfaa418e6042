"""The C++ backend in health: what a client sends reaches the engine, what the engine answers reaches the client."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_backend import add_ensemble, add_model
from grpc_stream import GrpcStream
from sse_client import stream_many
from triton_server import TritonServer

OWN_INPUTS = """input { name: "text_input" data_type: TYPE_STRING dims: [1] }
input { name: "REQUEST_HANDLE" data_type: TYPE_UINT64 dims: [1] optional: true }
"""


@pytest.fixture(scope="module")
def server(fake_backend_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """llm: as fast as it can; slow, paced: a token per 10 ms; deaf: slow, ignores cancels; tok, detok: not decoupled.

    executed, observed, paced and refusing are asked by one test each, so that their counters are its own.
    """
    repository = tmp_path_factory.mktemp("repository")
    for name in ("llm", "executed", "observed", "refusing"):
        add_model(repository, name, {"burst": "4"})
    for name in ("slow", "paced"):
        add_model(repository, name, {"step_ms": "10"})
    add_model(repository, "deaf", {"step_ms": "10", "ignore_cancel": "true"})
    add_model(repository, "tok", {"task": "tokenize"})
    add_model(repository, "one_answer", {}, "model_transaction_policy { decoupled: false }\n")
    add_model(repository, "detok", {"task": "detokenize"}, OWN_INPUTS)
    add_ensemble(repository, "slow", "text_output", "text_input")
    with TritonServer(repository, fake_backend_dir) as started:
        yield started


def metric(server: TritonServer, family: str, model: str, **labels: str) -> float:
    wanted = {f'{key}="{value}"' for key, value in {"model": model, "version": "1", **labels}.items()}
    for name, value in server.metrics().items():
        found, _, pairs = name[:-1].partition("{")
        if found == family and set(pairs.split(",")) == wanted:
            return value
    raise AssertionError(f"no {family} with {wanted} in {server.metrics()}")


# ---------------------------------------------------------------- text arrives


def test_text_arrives_over_grpc_and_the_last_token_is_final(server: TritonServer) -> None:
    with GrpcStream(server.grpc_url) as stream:
        stream.send("llm", "the quick brown fox")
        stream.wait(num_ends=1)
    assert stream.texts == [" the", " quick", " brown", " fox"]
    assert stream.num_finals == 1 and not stream.errors


def test_text_arrives_over_http(server: TritonServer) -> None:
    [stream] = stream_many(server.http_url, "llm", [{"text_input": "the quick brown fox"}])
    assert stream.texts() == [" the", " quick", " brown", " fox"] and stream.is_complete
    status, body = server.post("/v2/models/llm/generate", {"text_input": "one"})
    assert (status, json.loads(body)["text_output"]) == (200, " one")


def test_text_arrives_from_models_that_are_not_decoupled(server: TritonServer) -> None:
    request = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["hi"]}]}
    status, body = server.post("/v2/models/tok/infer", {**request, "outputs": [{"name": "text_output"}]})
    assert status == 200, body
    assert json.loads(body)["outputs"][0]["data"] == [" hi"]


def test_config_pbtxt_may_ask_for_one_response_a_request(server: TritonServer) -> None:
    request = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["hi"]}]}
    outputs = {"outputs": [{"name": "text_output"}]}
    status, body = server.post("/v2/models/one_answer/infer", {**request, **outputs})
    assert status == 200 and json.loads(body)["outputs"][0]["data"] == [" hi"], body
    status, body = server.post("/v2/models/llm/infer", {**request, **outputs})
    assert status >= 400 and "decoupled" in str(body)


def test_an_empty_final_response_ends_the_stream(server: TritonServer) -> None:
    with GrpcStream(server.grpc_url) as stream:
        stream.send("llm", {"tokens": 3, "then": "empty_final"})
        stream.wait(num_ends=1)
    assert len(stream.texts) == 3 and stream.num_finals == 1


def test_an_error_after_good_tokens_reaches_the_client(server: TritonServer) -> None:
    [stream] = stream_many(server.http_url, "llm", [{"text_input": json.dumps({"tokens": 2, "then": "error"})}])
    assert len(stream.texts()) == 2
    assert stream.errors() == ["scripted error: temperature [INVALID_ARG]"] and stream.is_complete
    status, body = server.post("/v2/models/llm/generate", {"text_input": json.dumps({"tokens": 0, "then": "error"})})
    assert status == 400, body


def test_a_response_for_an_unknown_handle_is_ignored(server: TritonServer) -> None:
    with GrpcStream(server.grpc_url) as stream:
        stream.send("llm", {"tokens": 1, "then": "unknown_handle"})
        stream.wait(num_ends=1)
    assert stream.texts == [" token"]


def test_large_texts_cross_both_ways(server: TritonServer) -> None:
    word = "é" * 2_500_000  # larger than any buffer on the way
    short = word[:500_000]  # HTTP: server 2.51 dies in its own JSON reader at about 9 MB of body
    status, body = server.post("/v2/models/llm/generate", {"text_input": short})
    assert status == 200 and json.loads(body)["text_output"] == " " + short
    with GrpcStream(server.grpc_url) as stream:
        stream.send("llm", word + " end")
        stream.wait(num_ends=1)
    assert [len(text) for text in stream.texts] == [len(word) + 1, 4]


# ---------------------------------------------------------------- what the engine sees


def test_tensors_parameters_and_ids_cross_unchanged(server: TritonServer) -> None:
    request = {
        "id": "request-7",
        "parameters": {"text": "é", "count": -3, "flag": True, "ratio": 0.25, "timeout": 1500000},
        "inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["héllo"]}],
        "outputs": [{"name": "seen"}],
    }
    status, body = server.post("/v2/models/tok/infer", request)
    assert status == 200, body
    seen = json.loads(json.loads(body)["outputs"][0]["data"][0])
    assert seen["id"] == "request-7" and seen["timeout_us"] == 1500000 and seen["outputs"] == ["seen"]
    assert seen["parameters"] == {"text": "é", "count": -3, "flag": True, "ratio": 0.25}
    assert seen["inputs"] == {"text_input": [13, [1], (b"\x06\0\0\0" + "héllo".encode()).hex()]}
    assert 0 <= seen["age_s"] < 5


def test_the_config_is_completed_from_the_contract(server: TritonServer) -> None:
    config = json.loads(server.get("/v2/models/llm/config")[1])
    assert [tensor["name"] for tensor in config["input"]] == ["text_input", "max_tokens", "stream", "temperature"]
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert [(group["kind"], group["count"]) for group in config["instance_group"]] == [("KIND_CPU", 1)]
    own = json.loads(server.get("/v2/models/detok/config")[1])
    assert [tensor["optional"] for tensor in own["input"]] == [False, True]  # the user's lists are left alone
    assert own["model_transaction_policy"] == {"decoupled": False}


# ---------------------------------------------------------------- what is too much is refused before it is copied

TOO_MUCH = {
    "parameters": ({"parameters": {f"p{i}": 1 for i in range(1025)}}, "1025 request parameters, accepted: at most"),
    "more than a count holds": ({"parameters": {f"p{i}": 1 for i in range(65_600)}}, "65600 request parameters"),
    "name": ({"parameters": {"n" * 257: 1}}, "a request parameter's name of 257 bytes, accepted: at most 256"),
    "id": ({"request_id": "i" * 1025}, "a request id of 1025 bytes, accepted: at most 1024"),
    "bytes": ({"parameters": {"p": "x" * (65 << 20)}}, "accepted: at most 67108864"),
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_too_much_is_refused_and_the_engine_lives(server: TritonServer, what: str) -> None:
    options, words = TOO_MUCH[what]
    with GrpcStream(server.grpc_url) as victim, GrpcStream(server.grpc_url) as stream:
        victim.send("slow", {"tokens": 60})
        victim.wait(num_texts=1)
        stream.send("slow", "x", **options)
        stream.wait(num_ends=1)
        victim.wait(num_ends=1)
    assert len(stream.errors) == 1 and words in stream.errors[0], stream.errors[0][:300]
    assert (len(victim.texts), victim.errors) == (60, [])


def test_as_much_as_is_accepted_crosses(server: TritonServer) -> None:
    parameters = {"n" * 256: 1} | {f"p{i}": i for i in range(1023)}
    with GrpcStream(server.grpc_url) as stream:
        stream.send("llm", "one two", parameters=parameters, request_id="i" * 1024)
        stream.wait(num_ends=1)
    assert (stream.texts, stream.errors) == ([" one", " two"], [])


# ---------------------------------------------------------------- HTTP loses nothing


@pytest.mark.parametrize("attempt", range(2))
def test_256_http_streams_in_bursts_are_complete(server: TritonServer, attempt: int) -> None:
    # Without HttpPacer this loses 700 to 7 000 of the 25 600 tokens and leaves 12 to 85 streams hanging.
    bodies: list[dict[str, object]] = [{"text_input": json.dumps({"tokens": 100})}] * 256
    streams = stream_many(server.http_url, "llm", bodies)
    assert [len(one.texts()) for one in streams] == [100] * 256
    assert all(one.is_complete for one in streams)


# ---------------------------------------------------------------- cancellation


def cancelled(server: TritonServer, model: str) -> float:
    return metric(server, "slipstream_fake_cancelled_total", model)


def wait_cancelled(server: TritonServer, model: str, before: float) -> None:
    server.wait_until(lambda: cancelled(server, model) == before + 1, "the cancellation to reach the engine")


@pytest.mark.parametrize("model", ["slow", "ensemble"])
def test_a_grpc_cancel_reaches_the_engine(server: TritonServer, model: str) -> None:
    before = cancelled(server, "slow")
    with GrpcStream(server.grpc_url) as stream:
        stream.send(model, {"tokens": 1000})
        stream.wait(num_texts=5)
        stream.cancel()
        wait_cancelled(server, "slow", before)


def test_every_one_of_many_cancelled_requests_is_noticed(server: TritonServer) -> None:
    before = cancelled(server, "slow")
    with GrpcStream(server.grpc_url) as stream:
        for index in range(300):  # several holds of the watcher's lock, and a longer period
            stream.send("slow", {"tokens": 100000}, request_id=str(index))
        while len(stream.answered) < 300:  # a request that the server has not read yet would never begin
            stream.wait(num_texts=len(stream.texts) + 1)
        stream.cancel()
        server.wait_until(lambda: cancelled(server, "slow") == before + 300, "all cancellations to arrive")


def handle_of(server: TritonServer) -> int:
    """The handle that a client of its own reads from its own answer."""
    request = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["hi"]}]}
    _, body = server.post("/v2/models/tok/infer", {**request, "outputs": [{"name": "request_handle"}]})
    return int(next(output["data"][0] for output in json.loads(body)["outputs"] if output["name"] == "request_handle"))


def test_nobody_cancels_a_request_by_a_guessed_handle(server: TritonServer) -> None:
    """A cancelled request to the model after an ensemble's generating one ends that of its REQUEST_HANDLE."""
    before = cancelled(server, "slow")
    with GrpcStream(server.grpc_url) as victim, GrpcStream(server.grpc_url) as attacker:
        own = handle_of(server)
        victim.send("slow", {"tokens": 150})
        victim.wait(num_texts=1)
        for guess in range(own - 50, own + 200):
            attacker.send("detok", "x", handle=guess % 2**64)
        attacker.cancel()
        victim.wait(num_ends=1)
    assert (len(victim.texts), victim.errors) == (150, [])
    assert cancelled(server, "slow") == before
    assert len({handle_of(server) >> 32 for _ in range(4)}) == 4, "handles can be counted"


@pytest.mark.parametrize("model", ["slow", "ensemble"])
def test_an_http_disconnect_reaches_the_engine(server: TritonServer, model: str) -> None:
    before = cancelled(server, "slow")
    host, port = server.http_url.split(":")
    body = json.dumps({"text_input": json.dumps({"tokens": 1000})}).encode()
    head = f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        while b"data:" not in connection.recv(65536):
            pass
    wait_cancelled(server, "slow", before)


def test_an_engine_that_ignores_a_cancel_is_not_waited_for(server: TritonServer) -> None:
    with GrpcStream(server.grpc_url) as stream:
        for _ in range(20):
            stream.send("deaf", {"tokens": 800})
        stream.wait(num_texts=100)
        stream.cancel()
        told = "did not answer a cancellation within 5 s, of "
        server.wait_until(lambda: told in server.log, "the requests to be given up")
        counts = [int(line.partition(" ")[0]) for line in server.log.split(told)[1:]]
        assert max(counts) > 1, "a line for each lets a client write to the log at will"
    with GrpcStream(server.grpc_url) as stream:
        stream.send("deaf", "still there")
        stream.wait(num_ends=1)
    assert stream.texts == [" still", " there"]


# ---------------------------------------------------------------- metrics


def test_executions_are_counted(server: TritonServer) -> None:
    def counts() -> list[float]:
        return [metric(server, family, "executed") for family in ("nv_inference_count", "nv_inference_exec_count")]

    assert counts() == [0, 0]
    with GrpcStream(server.grpc_url) as stream:
        for _ in range(3):
            stream.send("executed", "one two")
        stream.wait(num_ends=3)
    server.wait_until(lambda: counts() == [3, 3], "the executions to be counted")  # an answer may be there before
    [stats] = json.loads(server.get("/v2/models/executed/versions/1/stats")[1])["model_stats"]
    assert stats["execution_count"] == 3


def stats_of(server: TritonServer, model: str) -> dict[str, dict[str, int]]:
    [stats] = json.loads(server.get(f"/v2/models/{model}/versions/1/stats")[1])["model_stats"]
    return stats["inference_stats"]


def test_durations_of_triton_reach_to_the_last_response(server: TritonServer) -> None:
    before = stats_of(server, "paced")
    with GrpcStream(server.grpc_url) as stream:
        stream.send("paced", {"tokens": 30})  # a token per 10 ms
        stream.wait(num_ends=1)
    server.wait_until(lambda: stats_of(server, "paced")["success"]["count"] == 1, "the request to be counted")
    after = stats_of(server, "paced")
    seconds = {name: (after[name]["ns"] - before[name]["ns"]) * 1e-9 for name in after}
    assert seconds["compute_infer"] > 0.25, "it ended with the first call"
    assert seconds["success"] >= seconds["compute_infer"] > 10 * seconds["compute_input"]
    assert metric(server, "nv_inference_compute_infer_duration_us", "paced") > 250_000


def test_refused_and_failed_requests_are_failures(server: TritonServer) -> None:
    def counts() -> tuple[int, int]:
        stats = stats_of(server, "refusing")
        return stats["success"]["count"], stats["fail"]["count"]

    with GrpcStream(server.grpc_url) as stream:
        stream.send("refusing", "fine")
        stream.send("refusing", {"tokens": 3, "then": "error"})  # by the engine
        stream.wait(num_ends=2)
        stream.send("refusing", "fine", parameters={"x" * 300: "a name that is too long"})  # by the backend
        stream.wait(num_ends=3)
    server.wait_until(lambda: counts() == (1, 2), f"one success and two failures, not {counts()}")
    found = server.metrics().items()
    failures = {name: value for name, value in found if "request_failure" in name and "refusing" in name}
    assert sum(failures.values()) == 2, failures


def test_metrics_of_the_engine_are_exported_with_model_and_version(server: TritonServer) -> None:
    with GrpcStream(server.grpc_url) as stream:
        for _ in range(3):
            stream.send("observed", {"tokens": 7})
        stream.wait(num_ends=3)
    server.wait_until(  # the last of what the engine sends, behind the answers
        lambda: metric(server, "slipstream_fake_ttft_seconds_count", "observed") == 6, "the metrics of three requests"
    )
    assert metric(server, "slipstream_fake_tokens_total", "observed") == 21
    assert metric(server, "slipstream_fake_running", "observed", state="running") == 0
    low, high = (metric(server, "slipstream_fake_ttft_seconds_bucket", "observed", le=le) for le in ("0.1", "1"))
    assert (low, high) == (3, 6)
    assert metric(server, "slipstream_engine_up", "observed") == 1
    assert metric(server, "slipstream_engine_restarts_total", "observed") == 0
