"""Ranks of another node: a `slipstream worker` of this machine over loopback TCP, behind a proxy that is cut."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
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
from slipstream.engine import rank_link, remote_ranks
from slipstream.engine.build_id import build_id
from slipstream.engine.engine import Engine
from slipstream.engine.node_rank import Control as NodeControl
from slipstream.engine.rank_link import Link, LinkError, connect, read_secret
from slipstream.engine.remote_ranks import Listener
from slipstream.engine.validate import validate
from tiny_model import make_tiny_llama
from torch.distributed import HashStore

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
    """Of the same shapes: together the ranks would make nonsense."""
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


def test_a_rank_learns_at_once_that_its_engine_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its main thread waits for, and not when it asks the next time, here in a quarter of an hour."""
    ended = threading.Event()

    class Ended(Exception):
        pass

    def end(status: int) -> NoReturn:
        ended.set()
        raise Ended

    def watch_until_end() -> None:
        with suppress(Ended):
            NodeControl(other, 3600.0).watch()

    monkeypatch.setattr("slipstream.engine.node_rank.os._exit", end)
    one, other, near, _ = pair()
    watch = threading.Thread(target=watch_until_end, daemon=True)
    watch.start()
    assert json.loads(one.receive(PATIENCE_S)) == ["ping"]
    one.send(b"null")
    assert not ended.wait(0.2)
    near.shutdown(socket.SHUT_RDWR)
    assert ended.wait(PATIENCE_S)
    watch.join(PATIENCE_S)


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


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[tuple[Listener, tuple[str, int]]]:
    (tmp_path / "secret").write_bytes(SECRET)
    port = free_port()
    config = ParallelConfig(2, num_nodes=2, rank_address=f"127.0.0.1:{port}", rank_secret_file=str(tmp_path / "secret"))
    found = Listener(config, range(1, 2))
    yield found, ("127.0.0.1", port)
    found.close()


def hello(kind: str = "steps", **changes: object) -> dict[str, object]:
    return {"rank": 1, "world_size": 2, "kind": kind, "process": "a", "build": build_id(), **changes}


def test_why_no_rank_has_come(listener: tuple[Listener, tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The load says what only the log of the other node said."""
    waits, address = listener
    monkeypatch.setattr(waits, "_config", replace(waits._config, node_start_timeout_s=0.0))
    with pytest.raises(EngineError, match="does `slipstream worker` run on each other node"):
        waits.wait(lambda: None)
    assert reply_of(connect(address, SECRET, hello(world_size=4)))
    with pytest.raises(EngineError, match=r"127\.0\.0\.1, was refused: the model has 2 ranks, not 4"):
        waits.wait(lambda: None)


def reply_of(link: Link) -> str:
    refusal: str = json.loads(link.receive(PATIENCE_S))["refusal"]
    return refusal


def test_who_may_join(listener: tuple[Listener, tuple[str, int]]) -> None:
    """No stranger, nobody who recorded a greeting, no rank that is none; and a rank's latest process counts."""
    waits, address = listener
    for told in (b"", b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n" * 50, b"\xff" * 5000):
        with socket.create_connection(address, 30) as stranger:
            stranger.sendall(told)
            with suppress(OSError):  # refused already
                stranger.shutdown(socket.SHUT_WR)
            received = b""
            while part := read_or_end(stranger):
                received += part
            assert len(received) == 19 + 32, "a greeting and a number used once"
    with pytest.raises(LinkError):
        connect(address, b"another secret of theirs", hello())
    assert "--ranks 1 on each of 2 nodes" in reply_of(connect(address, SECRET, hello(world_size=4)))
    assert "ranks of other nodes are 1" in reply_of(connect(address, SECRET, hello(rank=0)))
    for build in (None, "0.0.1"):
        reply = reply_of(connect(address, SECRET, hello(build=build)))
        assert reply == f"it runs Slipstream {build}, the engine {build_id()}: the same on all nodes is accepted"
    assert "ranks of other nodes are 1" in reply_of(connect(address, SECRET, hello(kind="")))
    early = connect(address, SECRET, hello())
    assert reply_of(early) == ""
    links = [connect(address, SECRET, hello(kind, process="b")) for kind in ("steps", "control")]
    assert [reply_of(link) for link in links] == ["", ""]
    (joined,) = waits.wait(lambda: None)
    joined.steps.send(b"of the engine")
    assert links[0].receive(PATIENCE_S) == b"of the engine"
    with pytest.raises((EOFError, OSError)):
        early.receive(PATIENCE_S)


def read_or_end(connection: socket.socket) -> bytes:
    try:
        return connection.recv(4096)
    except OSError:
        return b""


def test_strangers_are_few_and_short(
    listener: tuple[Listener, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who say nothing are dropped; beyond a number, new ones at once; then a rank can join."""
    waits, address = listener
    monkeypatch.setattr("slipstream.engine.rank_link.HANDSHAKE_TIMEOUT_S", 1.0)
    silent = [socket.create_connection(address, 30) for _ in range(remote_ranks._MAX_STRANGERS + 4)]
    for one in silent:
        while read_or_end(one):
            pass
        one.close()
    wait_until(lambda: waits._strangers._value == remote_ranks._MAX_STRANGERS, "the strangers to be dropped")
    assert reply_of(connect(address, SECRET, hello())) == ""


def pair(max_bytes: int | None = 1 << 16) -> tuple[Link, Link, socket.socket, socket.socket]:
    near, far = socket.socketpair()
    keys = b"k" * 32, b"l" * 32
    return Link(near, *keys, max_bytes), Link(far, *reversed(keys), max_bytes), near, far


def test_frames_of_a_link() -> None:
    """In order, once, whole, from the other end alone, and no longer than accepted."""
    one, other, near, far = pair()
    one.send(b"first")
    one.send(b"")
    assert [other.receive(1), other.receive(1)] == [b"first", b""]
    with pytest.raises(TimeoutError):
        other.receive(0.05)
    one.send(b"again")
    frame = far.recv(4096)
    for wrong in (frame[:4] + b"other" + frame[9:], frame[:-1] + bytes([frame[-1] ^ 1])):
        near.sendall(wrong)
        with pytest.raises(LinkError, match="has not sent"):
            other.receive(1)
    near.sendall(frame)
    assert other.receive(1) == b"again"
    near.sendall(frame)  # a second time
    with pytest.raises(LinkError, match="has not sent"):
        other.receive(1)
    near.sendall((1 << 17).to_bytes(4, "little"))
    with pytest.raises(LinkError, match="accepted: at most 65536"):
        other.receive(1)
    near.close()
    with pytest.raises((EOFError, OSError)):
        other.receive(1)


def test_a_message_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a step that brings an adapter: in frames, each of which is checked before the next one is read. What a rank
    says has a bound also in frames."""
    monkeypatch.setattr(rank_link, "MAX_FRAME_BYTES", 100)
    for size in (0, 99, 100, 101, 1000):
        one, other, *_ = pair(None)
        message = bytes(index % 251 for index in range(size))
        one.send(message)
        one.send(b"next")
        assert [other.receive(1), other.receive(1)] == [message, b"next"]
    one, other, near, far = pair(None)
    one.send(b"x" * 250)
    frames = far.recv(4096)
    near.sendall(frames[:3] + bytes([frames[3] ^ 0x80]) + frames[4:])  # as if nothing followed
    with pytest.raises(LinkError, match="has not sent"):
        other.receive(1)
    one, other, *_ = pair(150)
    one.send(b"x" * 151)
    with pytest.raises(LinkError, match="a frame of 51 bytes, accepted: at most 50"):
        other.receive(1)


def test_what_a_rank_may_ask() -> None:
    """Anything else loses the rank, and nothing of it is unpickled."""
    for question in (b'["system", "ls"]', b"[]", b"{}", b"1", b"\x80\x04.", b'["check", 5]', b'["set", "a", "zz"]'):
        one, other, *_ = pair()
        joined = remote_ranks.Joined(1, one, one)
        rank = remote_ranks.RemoteRank(joined, HashStore(), 30.0)
        rank.begin("setup")
        other.receive(1)
        other.send(question)
        wait_until(lambda rank=rank: bool(rank.loss()), "the rank to be lost")
        assert "rank 1 has asked for what it may not" in rank.loss()


def test_secrets(tmp_path: Path) -> None:
    for content in (b"", b"short", b"x" * 5000):
        (tmp_path / "secret").write_bytes(content)
        with pytest.raises(ConfigError, match=r"rank_secret_file=.*16 to 4096 bytes"):
            read_secret(str(tmp_path / "secret"))
    with pytest.raises(ConfigError, match=r"No such file"):
        read_secret(str(tmp_path / "none"))
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    assert read_secret(str(tmp_path / "secret")) == SECRET


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
