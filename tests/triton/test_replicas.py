"""Several engines behind one model: which one gets a request, and what holds when one of them dies."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from fake_backend import add_model
from grpc_stream import GrpcStream
from patience import wait_until
from processes import children_of, is_alive, pids_of
from triton_server import TritonServer

NUM_REPLICAS = 3
GROUP = f"instance_group {{ count: {NUM_REPLICAS} kind: KIND_CPU }}\n"
TELL = {"tokens": 1, "word": "replica"}
LONG = "a prompt with a beginning of more than one block " * 40


@pytest.fixture(scope="module")
def server(fake_backend_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    add_model(repository, "llm", {"step_ms": "2", "replica_load_slack": "2", "drain_timeout_s": "2"}, GROUP)
    add_model(repository, "mutinous", {"control_fails": "1"}, GROUP)
    add_model(repository, "broken", {"load": "fail"}, GROUP)
    with TritonServer(repository, fake_backend_dir, control_mode="explicit", load_models=["llm"]) as started:
        yield started


@pytest.fixture
def healthy(server: TritonServer) -> TritonServer:
    server.wait_until(lambda: ups(server) == [1] * NUM_REPLICAS, "all replicas to be up")
    server.wait_until(lambda: server.is_model_ready("llm"), "the model to be ready")
    return server


def of_replica(server: TritonServer, family: str, replica: int) -> float:
    return server.metrics().get(f'{family}{{model="llm",replica="{replica}",version="1"}}', -1.0)


def ups(server: TritonServer) -> list[float]:
    return [of_replica(server, "slipstream_engine_up", replica) for replica in range(NUM_REPLICAS)]


def told(server: TritonServer, prompt: str = "", **parameters: str) -> int:
    """The replica that answers a request."""
    body = {"text_input": json.dumps({**TELL, "prompt": prompt}), "parameters": parameters}
    status, reply = server.post("/v2/models/llm/generate", body)
    assert status == 200, reply
    return int(json.loads(reply)["text_output"])


@contextmanager
def staying(server: TritonServer, num_left: int) -> Iterator[GrpcStream]:
    """A stream for requests that hang; those that are left at the end are cancelled, and gone afterwards."""
    before = server.log.count("]: cancelled after")
    with GrpcStream(server.grpc_url) as stream:
        yield stream
        stream.cancel()
        server.wait_until(lambda: server.log.count("]: cancelled after") == before + num_left, "the cancels")
    told(server)  # behind the cancels' answers


def test_requests_go_to_the_replica_with_the_fewest(healthy: TritonServer) -> None:
    assert len(children_of(healthy.pid, "fake_engine")) == NUM_REPLICAS
    assert Counter(told(healthy) for _ in range(2 * NUM_REPLICAS)) == Counter(dict.fromkeys(range(NUM_REPLICAS), 2))
    with staying(healthy, 2 * NUM_REPLICAS) as stream:
        for number in range(2 * NUM_REPLICAS):  # as they stay, each goes to one of those with the fewest
            stream.send("llm", {"tokens": 1, "word": "replica", "then": "hang"})
            stream.wait(num_texts=number + 1)
        assert Counter(stream.texts) == Counter(dict.fromkeys(map(str, range(NUM_REPLICAS)), 2))


def test_a_prompt_goes_where_its_beginning_is_cached_unless_that_one_has_too_much(healthy: TritonServer) -> None:
    first = told(healthy, LONG)
    told(healthy, "another " + LONG)
    assert [told(healthy, LONG + f"turn {turn} " * turn) for turn in range(5)] == [first] * 5
    with staying(healthy, 4) as stream:
        for turn in range(1, 5):  # of one conversation, as nobody would: the earlier ones still run
            stream.send("llm", {"tokens": 1, "word": "replica", "then": "hang", "prompt": turn * LONG})
            stream.wait(num_texts=turn)
        assert stream.texts[:3] == stream.texts[:1] * 3, "replica_load_slack is 2"
        assert stream.texts[3] != stream.texts[0]


@pytest.mark.parametrize("name", ["cache_salt", "lora_name", "sampling_parameters"])
def test_what_parts_cached_prefixes_parts_prompts(healthy: TritonServer, name: str) -> None:
    values = ['{"cache_salt": "one"}', '{"cache_salt": "two"}'] if name == "sampling_parameters" else ["one", "two"]
    prompt = f"{name} " + LONG
    first, second = (told(healthy, prompt, **{name: value}) for value in values)
    assert first != second, "known of none, it went to the one that was chosen longest ago"
    assert [told(healthy, prompt + LONG, **{name: value}) for value in values] == [first, second]


def test_a_beginning_that_prompts_share_does_not_crowd_a_replica(healthy: TritonServer) -> None:
    told(healthy, LONG + "one question " * 40)
    with staying(healthy, NUM_REPLICAS) as stream:
        for number in range(NUM_REPLICAS):
            question = f"question {number} " * 40
            stream.send("llm", {"tokens": 1, "word": "replica", "then": "hang", "prompt": LONG + question})
            stream.wait(num_texts=number + 1)
        assert len(set(stream.texts)) == NUM_REPLICAS


def test_a_stop_goes_to_the_replica_that_has_the_request(healthy: TritonServer) -> None:
    with GrpcStream(healthy.grpc_url) as stream:
        for number in range(NUM_REPLICAS):
            stream.send("llm", {"tokens": 1, "then": "hang"}, request_id=f"request {number}")
        stream.wait(num_texts=NUM_REPLICAS)
        for number in range(NUM_REPLICAS):
            body = {"id": f"request {number}", "text_input": "", "parameters": {"stop": True}}
            status, reply = healthy.post("/v2/models/llm/generate", body)
            assert (status, json.loads(reply)["text_output"]) == (200, "1"), reply
        stream.wait(num_ends=NUM_REPLICAS)
    assert not stream.errors


def test_a_stop_goes_to_the_newest_request_of_its_id(healthy: TritonServer) -> None:
    with GrpcStream(healthy.grpc_url) as stream:
        for number in range(2):
            stream.send("llm", {"tokens": 1, "word": "replica", "then": "hang"}, request_id="the same")
            stream.wait(num_texts=number + 1)
        for number, replica in enumerate(reversed(stream.texts), 1):
            ended = f"llm[{replica}]: cancelled after 1"
            before = healthy.log.count(ended)
            body = {"id": "the same", "text_input": "", "parameters": {"stop": True}}
            assert json.loads(healthy.post("/v2/models/llm/generate", body)[1])["text_output"] == "1"
            stream.wait(num_ends=number)
            wait_until(partial(lambda text, least: healthy.log.count(text) > least, ended, before), ended)
    assert not stream.errors


@contextmanager
def crowded(fake_backend_dir: Path, folder: Path) -> Iterator[tuple[TritonServer, GrpcStream, int]]:
    """Two replicas, of which one has all the requests that it may have and knows LONG; the stream that they are of."""
    group = "instance_group { count: 2 kind: KIND_CPU }\n"
    parameters = {"max_num_seqs": "1", "max_queue_size": "0", "replica_load_slack": "1000000", "drain_timeout_s": "1"}
    add_model(folder, "llm", parameters, group)
    most = 1 + 1024
    with (
        TritonServer(folder, fake_backend_dir, control_mode="explicit", load_models=["llm"]) as server,
        GrpcStream(server.grpc_url) as stream,
    ):
        for number in range(most):
            script = {**TELL, "prompt": LONG, "then": "hang"}  # LONG begins as in `told`
            stream.send("llm", script, request_id=f"request {number}")
        stream.wait(num_texts=most)
        assert len(set(stream.texts)) == 1 and not stream.errors
        yield server, stream, most
        stream.cancel()


def test_a_full_replica_takes_a_stop(fake_backend_dir: Path, tmp_path: Path) -> None:
    """It ends the request that it names, and makes room."""
    with crowded(fake_backend_dir, tmp_path) as (server, stream, _):
        body = {"id": "request 7", "text_input": "", "parameters": {"stop": True}}
        status, reply = server.post("/v2/models/llm/generate", body)
        assert (status, json.loads(reply).get("text_output")) == (200, "1"), reply
        stream.wait(num_ends=1)
        assert server.post("/v2/models/llm/generate", {"text_input": "x"})[0] == 200, "another has room"


def test_a_long_stop_counts_like_any_request_and_goes_to_no_other_replica(
    fake_backend_dir: Path, tmp_path: Path
) -> None:
    """Another replica took it, and answered that what it never had was stopped."""
    with crowded(fake_backend_dir, tmp_path) as (server, _, most):
        body = {"id": "request 7", "text_input": "x" * (16 << 10), "parameters": {"stop": True}}
        status, reply = server.post("/v2/models/llm/generate", body)
        assert status == 400 and f"{most} requests of the model are not answered yet" in str(reply), reply


def test_a_command_reaches_full_replicas_as_well(fake_backend_dir: Path, tmp_path: Path) -> None:
    """It was refused by the full one and carried out by the other: the model was half asleep."""
    with crowded(fake_backend_dir, tmp_path) as (server, _, _):
        status, reply = server.post("/v2/models/llm/generate", {"control": "sleep"})
        assert (status, json.loads(reply).get("text_output")) == (200, "done"), reply
        server.wait_until(lambda: server.log.count("told to sleep") == 2, "every engine's line")


@contextmanager
def hanging(fake_backend_dir: Path, folder: Path) -> Iterator[TritonServer]:
    """Two replicas, of which the first answers no command."""
    parameters = {"max_num_seqs": "1", "max_queue_size": "0", "control_hangs": "0", "drain_timeout_s": "1"}
    add_model(folder, "llm", parameters, "instance_group { count: 2 kind: KIND_CPU }\n")
    with TritonServer(folder, fake_backend_dir, control_mode="explicit", load_models=["llm"]) as server:
        yield server


def test_a_command_that_one_has_no_room_for_reaches_none(fake_backend_dir: Path, tmp_path: Path) -> None:
    with hanging(fake_backend_dir, tmp_path) as server, GrpcStream(server.grpc_url) as stream:
        most = 1 + 1024 + 256  # 256 that only commands have
        for _ in range(most):
            stream.send("llm", "", parameters={"control": "is_sleeping"})
        server.wait_until(lambda: server.log.count("llm[0]: told to is_sleeping") == most, "the questions")
        status, reply = server.post("/v2/models/llm/generate", {"control": "sleep"})
        assert status == 400 and f"{most} requests of the model are not answered yet" in str(reply), reply
        assert told(server) == 1, "it has answered all of its own"
        assert "told to sleep" not in server.log
        stream.cancel()


def test_one_command_at_a_time_changes_the_replicas(fake_backend_dir: Path, tmp_path: Path) -> None:
    """Each was carried out by the replicas that had ended the one before, and refused by the others."""
    with hanging(fake_backend_dir, tmp_path) as server, GrpcStream(server.grpc_url) as stream:
        stream.send("llm", "", parameters={"control": "sleep"})
        server.wait_until(lambda: server.log.count("told to sleep") == 2, "every engine's line")
        for command in ("wake_up", "sleep"):
            status, reply = server.post("/v2/models/llm/generate", {"control": command})
            assert status == 400 and "another command to the model is under way" in str(reply), reply
        assert server.log.count("told to") == 2
        stream.send("llm", "", parameters={"control": "is_sleeping"})  # changes nothing
        server.wait_until(lambda: server.log.count("told to is_sleeping") == 2, "the question")
        stream.cancel()


def test_a_command_is_short(healthy: TritonServer) -> None:
    body = {"text_input": "x" * (16 << 10), "control": "sleep"}
    status, reply = healthy.post("/v2/models/llm/generate", body)
    assert status == 400 and re.search(r"a command of 16\d\d\d bytes, accepted: at most 16384", str(reply)), reply


def test_a_prompt_is_known_to_the_replica_that_took_it(fake_backend_dir: Path, tmp_path: Path) -> None:
    """It counted as sent to the one that refused it, too, which was then the better one for the next turn."""
    with crowded(fake_backend_dir, tmp_path) as (server, stream, most):
        full = int(stream.texts[0])
        conversation = LONG + "a turn that only the other replica has seen " * 40
        assert told(server, conversation) == 1 - full
        stream.cancel()
        server.wait_until(lambda: server.log.count("]: cancelled after") == most, "the cancels")
        wait_until(lambda: told(server) == full, "the cancels' answers")
        assert told(server) == 1 - full, "it was not the last one that was chosen"
        assert told(server, conversation + "the next turn " * 40) == 1 - full


def test_a_command_is_for_all_and_has_one_answer(healthy: TritonServer) -> None:
    before = healthy.log.count("told to sleep")
    first = told(healthy, LONG)
    for turn in range(1, 4):  # who asks changes nothing
        assert healthy.post("/v2/models/llm/generate", {"control": "is_sleeping"})[0] == 200
        assert told(healthy, LONG + "more " * 80 * turn) == first
    status, body = healthy.post("/v2/models/llm/generate", {"control": "sleep"})
    assert (status, json.loads(body)["text_output"]) == (200, "done")
    # an engine's line comes through the server's log, which may be behind its answer
    wait_until(lambda: healthy.log.count("told to sleep") >= before + NUM_REPLICAS, "every engine's line")
    assert healthy.log.count("told to sleep") == before + NUM_REPLICAS


def test_a_command_that_one_refuses_is_refused(server: TritonServer) -> None:
    assert server.load("mutinous")[0] == 200
    status, body = server.post("/v2/models/mutinous/generate", {"control": "sleep"})
    assert status == 400 and json.loads(body)["error"] == "1 cannot [INVALID_ARG]"
    assert server.unload("mutinous")[0] == 200


def test_others_serve_while_a_replica_is_down(healthy: TritonServer) -> None:
    restarts = [of_replica(healthy, "slipstream_engine_restarts_total", i) for i in range(NUM_REPLICAS)]
    with staying(healthy, NUM_REPLICAS - 1) as stream:
        for number in range(NUM_REPLICAS):
            stream.send("llm", {"tokens": 1, "word": "replica", "then": "hang"})
            stream.wait(num_texts=number + 1)
        assert sorted(stream.texts) == ["0", "1", "2"]
        stream.send("llm", {**TELL, "then": "crash"})
        stream.wait(num_ends=2)
        lost = int(stream.texts[-1])
        assert len(stream.errors) == 2 and stream.num_finals == 0, "only those of the replica that died"
        for error in stream.errors:
            assert (
                error.startswith(f"replica {lost} of model 'llm' was killed by signal 9") and "[UNAVAILABLE]" in error
            )
        seen = []
        while of_replica(healthy, "slipstream_engine_up", lost) == 0:
            assert healthy.is_model_ready("llm")
            seen.append(told(healthy))
        assert lost not in seen[:-1]
        restarts[lost] += 1
        assert restarts == [of_replica(healthy, "slipstream_engine_restarts_total", i) for i in range(NUM_REPLICAS)]
        wait_until(lambda: told(healthy) == lost, "the replica to get requests again")


def test_a_replica_whose_process_still_ends_gets_no_requests(healthy: TritonServer) -> None:
    """Its connection has ended; the process takes 0.8 s more, as one does that gives much memory back."""
    with GrpcStream(healthy.grpc_url) as stream:
        stream.send("llm", {**TELL, "then": "linger"})
        stream.wait(num_texts=1)
        lost, start, seen = int(stream.texts[0]), time.monotonic(), []
        while time.monotonic() < start + 0.6:  # any that goes there would wait, and then fail
            seen.append(told(healthy))
        assert len(children_of(healthy.pid, "fake_engine")) == NUM_REPLICAS, "it is still there"
        assert set(seen) == set(range(NUM_REPLICAS)) - {lost}
        stream.wait(num_ends=1)
        assert f"replica {lost} of model 'llm' exited with status 7" in stream.errors[0]
    healthy.wait_until(lambda: ups(healthy) == [1] * NUM_REPLICAS, "all replicas to be up")


def test_the_model_is_not_ready_while_all_are_down(healthy: TritonServer) -> None:
    for process in children_of(healthy.pid, "fake_engine"):
        process.kill()
    healthy.wait_until(lambda: not healthy.is_model_ready("llm"), "the model to be unloaded")
    healthy.wait_until(lambda: healthy.is_model_ready("llm"), "the model to come back")
    healthy.wait_until(lambda: ups(healthy) == [1] * NUM_REPLICAS, "all replicas to be up")
    assert len({told(healthy) for _ in range(NUM_REPLICAS)}) == NUM_REPLICAS


def test_a_load_fails_when_a_replica_cannot_load(server: TritonServer) -> None:
    others = pids_of(server.pid)
    status, body = server.load("broken")
    assert status == 400 and "tensor 'lm_head.weight' is missing" in body.decode()
    wait_until(lambda: pids_of(server.pid) <= others, "the engines to end")


def test_the_end_drains_all_replicas_in_the_same_time(healthy: TritonServer) -> None:
    """Last of the module: the server is gone afterwards."""
    with GrpcStream(healthy.grpc_url) as stream:
        for _ in range(NUM_REPLICAS):
            stream.send("llm", {"tokens": 1, "then": "hang"})
        stream.wait(num_texts=NUM_REPLICAS)
        engines = children_of(healthy.pid, "fake_engine")
        os.kill(healthy.pid, signal.SIGTERM)
        stream.wait(num_ends=NUM_REPLICAS)
        assert all("did not end within drain_timeout_s" in error for error in stream.errors)
    wait_until(lambda: not any(map(is_alive, engines)), "the engines to end")
