"""Ranks of another node: a `slipstream worker` of this machine over loopback TCP, behind a proxy that is cut."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from engine_driver import GREEDY, Told, make_engine, run_all, run_steps
from llm_server import parameter
from nodes import Node, free_port
from patience import PATIENCE_S, wait_until
from processes import is_alive
from slipstream.core.config import ParallelConfig
from slipstream.core.config_parse import parse_parameters
from slipstream.core.control import SLEEP, WAKE_UP, Control
from slipstream.core.errors import ConfigError, EngineError, RankLostError
from slipstream.core.request import FinishReason, Request
from slipstream.engine.engine import Engine
from slipstream.engine.validate import validate
from tiny_model import make_tiny_llama

SECRET = b"a secret of two machines"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("node"), SECRET) as found:
        yield found


def parallel(node: Node, **changes: object) -> ParallelConfig:
    two = ParallelConfig(2, num_nodes=2, rank_address=node.address, rank_secret_file=str(node.secret))
    return replace(two, node_timeout_s=4.0, node_start_timeout_s=PATIENCE_S, **changes)  # type: ignore[arg-type]


def fail_midway(engine: Engine, prompts: list[list[int]], lose: Callable[[], object]) -> None:
    """Every request ends with the reason, soon."""
    requests = [engine.submit(Request(list(prompt), replace(GREEDY, max_tokens=60)))[0] for prompt in prompts[4:8]]
    told: dict[Request, Told] = {}
    run_steps(engine, told, 3)
    lose()
    run_steps(engine, told)
    assert isinstance(engine.error, RankLostError) and "the model starts again" in str(engine.error)
    assert [told[one].finish_reason for one in requests] == [FinishReason.ERROR] * 4
    engine.close()


def test_a_rank_of_another_node(node: Node, tiny_llama: Path, prompts: list[list[int]]) -> None:
    """It says what one process says, is lost in every way, and comes back by itself each time."""
    alone = make_engine(tiny_llama)
    expected = [one.token_ids for one in run_all(alone, prompts[4:8], GREEDY)]
    ways: list[tuple[Callable[[], object], str]] = [
        (node.freeze, "rank 1 has not been heard of for 4 s"),
        (lambda: node.rank().suspend(), "the connection to rank 1 has ended"),  # its worker ends it
        (node.proxy.cut, "the connection to rank 1 has ended"),
        (node.proxy.pause, "rank 1"),  # packets do not arrive: a call waits, and no end is told
    ]
    for lose, reason in ways:
        engine = make_engine(tiny_llama, parallel=parallel(node, rank_timeout_s=10.0))
        assert [one.token_ids for one in run_all(engine, prompts[4:8], GREEDY)] == expected
        rank = node.rank()
        fail_midway(engine, prompts, lose)
        assert reason in str(engine.error)
        node.thaw()
        wait_until(lambda rank=rank: not is_alive(rank), "the rank to end without its engine")  # type: ignore[misc]
        node.proxy.resume()


def test_a_rank_of_another_node_sleeps_too(node: Node, tiny_llama: Path, prompts: list[list[int]]) -> None:
    """One that does not come to its end is lost, be it that it runs."""
    patient = replace(parallel(node, rank_timeout_s=5.0), node_timeout_s=PATIENCE_S)
    engine = make_engine(tiny_llama, parallel=patient)
    before = [one.token_ids for one in run_all(engine, prompts[4:6], GREEDY)]
    for control in (Control(SLEEP, 2), Control(WAKE_UP)):
        order = engine.post(control)
        run_steps(engine, {})
        order.wait()
    assert [one.token_ids for one in run_all(engine, prompts[4:6], GREEDY)] == before
    rank = node.rank()
    node.freeze()  # no process of this machine to look at: found by rank_timeout_s, before node_timeout_s
    order = engine.post(Control(SLEEP, 2))
    run_steps(engine, {})
    with pytest.raises(RankLostError, match="rank_timeout_s"):
        order.wait()
    engine.close()
    node.thaw()
    wait_until(lambda: not is_alive(rank), "the rank to end")


def test_a_node_with_other_weights_does_not_serve(tiny_llama: Path, tmp_path: Path) -> None:
    """The weights have the same shapes, so together the ranks would compute nonsense."""
    other = make_tiny_llama(tmp_path / "other", seed=1)
    reason = f"rank 1: model='{other}': holds other weights than the first node has"
    with Node(tmp_path, SECRET, "--model", str(other)) as node, pytest.raises(EngineError, match=reason):
        make_engine(tiny_llama, parallel=parallel(node))


def test_a_load_that_fails_ends_the_ranks_of_another_node(node: Node, tiny_llama: Path) -> None:
    """And says why it failed here."""
    found: list[psutil.Process] = []

    def fail(*arguments: object) -> NoReturn:
        found.append(node.rank())
        raise RuntimeError("no memory for the first rank")

    with pytest.raises(RuntimeError, match="no memory for the first rank"):
        make_engine(tiny_llama, parallel=parallel(node), make_worker=fail)
    wait_until(lambda: not is_alive(found[0]), "the rank to end with the load")


def test_a_node_that_does_not_come(tiny_llama: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    address = f"127.0.0.1:{free_port()}"
    two = ParallelConfig(2, num_nodes=2, rank_address=address, rank_secret_file=str(secret), node_start_timeout_s=1.0)
    with pytest.raises(EngineError, match=r"ranks 1 have not come to .* in 1 s \(node_start_timeout_s\)"):
        make_engine(tiny_llama, parallel=two)
    with (
        socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))),
        pytest.raises(ConfigError, match="free port"),
    ):
        make_engine(tiny_llama, parallel=two)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_nodes": "2"}, "num_nodes=2: accepted: 1, or what divides the 1 ranks of the model"),
        ({"num_nodes": "2", "tensor_parallel_size": "4"}, "rank_secret_file='': missing"),
        ({"num_nodes": "9"}, "num_nodes"),
        ({"rank_address": "host"}, "rank_address='host': accepted: HOST:PORT"),
        ({"node_timeout_s": "0.1"}, "node_timeout_s='0.1': accepted: a number from 1 to 3600"),
        ({"node_start_timeout_s": "0"}, "node_start_timeout_s='0': accepted: a number from 1 to 86400"),
    ],
)
def test_parameters_of_nodes(changes: dict[str, str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_parameters({"model": str(tmp_path), **changes}, tmp_path)


def test_validate_says_where_ranks_are(tiny_llama: Path, tmp_path: Path) -> None:
    """And that a secret is there, which only a load of several nodes would read."""
    folder = tmp_path / "llm"
    (folder / "1").mkdir(parents=True)
    values = {"model": tiny_llama, "device": "cpu", "tensor_parallel_size": 2, "num_nodes": 2, "num_blocks": 64}
    values["rank_secret_file"] = "../secret"
    text = "".join(parameter(key, value) for key, value in values.items())
    (folder / "config.pbtxt").write_text(f'backend: "slipstream"\n{text}')
    with pytest.raises(ConfigError, match=r"rank_secret_file=.*no such folder|No such file"):
        validate(folder)
    (tmp_path / "secret").write_bytes(SECRET)
    report = validate(folder)
    assert "this machine: 1 on cpu" in report and "--nodes 2 --ranks 1 --node 1" in report
