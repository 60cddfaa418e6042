"""A model that processes, stages or two nodes share, on the real server: it answers as one does, and a lost process is
replaced. The other node is a `slipstream worker` behind a proxy of this machine."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from llm_client import grpc_infer, grpc_stream, http_generate
from llm_server import LlmServer
from nodes import Node
from processes import children_of, is_alive

PROMPT = "def add(a, b):\n"
SHORT = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
LONG = {**SHORT, "max_tokens": 1500}
LOST = "rank 1 has ended: the model starts again [UNAVAILABLE]"


def ranks_of(server: LlmServer) -> list[psutil.Process]:
    """Processes of ranks that run below the server."""
    return children_of(server.pid, "rank_main", recursive=True)


def text_of(server: LlmServer, model: str) -> str:
    answer = grpc_infer(server.grpc_url, model, {"text_input": PROMPT, "stream": True}, parameters=SHORT)
    assert answer.error == ""
    return answer.text


def test_two_processes_serve_a_model_until_one_is_killed_or_stopped(llm_server: LlmServer) -> None:
    expected = text_of(llm_server, "llm")
    with llm_server.variant("shared", {"tensor_parallel_size": 2}) as model:
        assert text_of(llm_server, model) == expected
        with grpc_stream(llm_server.grpc_url) as stream, ThreadPoolExecutor(1) as pool:
            stream.send(model, {"text_input": PROMPT, "stream": True}, parameters=LONG)
            assert not stream.receive()[2]
            whole = pool.submit(http_generate, llm_server.http_url, model, {"text_input": PROMPT, **LONG})
            assert not stream.receive()[2]
            time.sleep(0.3)  # until the second request runs as well
            (rank,) = ranks_of(llm_server)
            rank.send_signal(signal.SIGKILL)
            assert stream.collect(timeout_s=10).error.endswith(LOST)
            status, reply = whole.result(timeout=10)
            assert status >= 400 and LOST in str(reply)
        llm_server.wait_until(lambda: not llm_server.is_model_ready(model), "the model not to be ready")
        llm_server.wait_model_ready(model)
        assert text_of(llm_server, model) == expected
        (again,) = ranks_of(llm_server)
        assert again.pid != rank.pid
        again.suspend()  # while nothing runs: no request has to find out
        llm_server.wait_until(lambda: not llm_server.is_model_ready(model), "the model not to be ready")
        llm_server.wait_model_ready(model)
        assert text_of(llm_server, model) == expected
    llm_server.wait_until(lambda: not ranks_of(llm_server), "the ranks to end with their model")


def test_a_model_in_stages_loses_one_with_steps_in_both(llm_server: LlmServer) -> None:
    expected = text_of(llm_server, "llm")
    with llm_server.variant("stages", {"pipeline_parallel_size": 2}) as model:
        assert text_of(llm_server, model) == expected
        with grpc_stream(llm_server.grpc_url) as stream, grpc_stream(llm_server.grpc_url) as other:
            for one in (stream, other):
                one.send(model, {"text_input": PROMPT, "stream": True}, parameters=LONG)
            for one in (stream, other):
                assert not one.receive()[2]
            (stage,) = ranks_of(llm_server)
            stage.send_signal(signal.SIGSTOP)
            for one in (stream, other):
                error = one.collect(timeout_s=30).error
                assert "rank 1" in error and error.endswith("the model starts again [UNAVAILABLE]")
        llm_server.wait_until(lambda: not llm_server.is_model_ready(model), "the model not to be ready")
        llm_server.wait_model_ready(model)
        assert text_of(llm_server, model) == expected
        assert ranks_of(llm_server) and not is_alive(stage)
    llm_server.wait_until(lambda: not ranks_of(llm_server), "the stages to end with their model")


def test_a_lost_stage_ends_its_engine_and_the_other_one_serves(llm_server: LlmServer, tmp_path: Path) -> None:
    """Replicas of two stages each: a request of either runs when a stage of one is killed."""
    from tiny_model import make_tiny_llama  # here: it imports transformers, and every worker collects this file

    tiny = make_tiny_llama(tmp_path, max_position_embeddings=4096)
    parameters = {"pipeline_parallel_size": 2, "num_blocks": 1024, "block_size": 8, "max_num_seqs": 4}
    replicas = "instance_group { count: 2 kind: KIND_CPU }\n"
    with llm_server.variant("stage_pair", parameters, tiny, replicas) as model:
        first, second = (text_of(llm_server, model) for _ in range(2))  # too short to have a place: one each
        assert first == second != ""
        made = "slipstream_generation_tokens_total"
        llm_server.wait_until(
            lambda: [llm_server.metric(made, model, replica=one) for one in "01"] == [24, 24], "both to have answered"
        )
        with grpc_stream(llm_server.grpc_url, cancel=True) as stream:
            for name in ("one", "other"):
                inputs = {"text_input": PROMPT, "stream": True}
                stream.send(model, inputs, parameters={**LONG, "max_tokens": 3900}, request_id=name)
            llm_server.wait_until(
                lambda: all(llm_server.metric(made, model, replica=one) > 24 for one in "01"), "both to answer"
            )
            stages = ranks_of(llm_server)
            assert len(stages) == 2 == len({stage.ppid() for stage in stages})
            stages[0].kill()
            error = ""
            while not error:
                _, is_last, error = stream.receive()
                assert is_last is bool(error)
            assert error.endswith(LOST)
            llm_server.wait_until(lambda: llm_server.metric("slipstream_engine_up", model) == 1, "one to be down")
            assert text_of(llm_server, model) == first and llm_server.is_model_ready(model)
            for _ in range(50):
                assert stream.receive()[1:] == (False, ""), "the request of the other engine goes on"
    llm_server.wait_until(lambda: not ranks_of(llm_server), "the stages to end with their model")


def test_two_nodes_serve_a_model_until_one_or_the_network_is_lost(llm_server: LlmServer, tmp_path: Path) -> None:
    """Each has a stage. The other node is killed in the middle of a stream and comes back; then nothing passes between
    them, while it is idle. The model is ready exactly when both are there."""
    expected = text_of(llm_server, "llm")
    with Node(tmp_path, b"a secret of two machines") as node:
        parameters = {
            "pipeline_parallel_size": 2,
            "num_nodes": 2,
            "rank_address": node.address,
            "rank_secret_file": node.secret,
            "node_timeout_s": 4,
            "device": "cpu",
        }
        with llm_server.variant("nodes", parameters) as model:
            assert text_of(llm_server, model) == expected
            with grpc_stream(llm_server.grpc_url) as stream:
                stream.send(model, {"text_input": PROMPT, "stream": True}, parameters=LONG)
                assert not stream.receive()[2]
                rank = node.rank()
                node.worker.kill()
                assert stream.collect(timeout_s=30).error.endswith("the model starts again [UNAVAILABLE]")
            llm_server.wait_until(lambda: not llm_server.is_model_ready(model), "the model not to be ready")
            llm_server.wait_until(lambda: not is_alive(rank), "the rank to end with its worker")
            node.start()
            llm_server.wait_model_ready(model)
            assert text_of(llm_server, model) == expected
            rank = node.rank()
            node.proxy.pause()
            llm_server.wait_until(lambda: not llm_server.is_model_ready(model), "the model not to be ready")
            llm_server.wait_until(lambda: not is_alive(rank), "the rank to end by itself")
            node.proxy.resume()
            llm_server.wait_model_ready(model)
            assert text_of(llm_server, model) == expected
