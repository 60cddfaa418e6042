"""Connections of the engine and ranks of other nodes: who may join, and what both ends take from each other."""

from __future__ import annotations

import errno
import fcntl
import json
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from nodes import free_port
from patience import PATIENCE_S, wait_until
from slipstream.core.config import ParallelConfig
from slipstream.core.errors import ConfigError, EngineError
from slipstream.engine import rank_link, remote_ranks
from slipstream.engine.build_id import build_id
from slipstream.engine.node_rank import Control as NodeControl
from slipstream.engine.rank_link import Link, LinkError, connect, read_secret
from slipstream.engine.remote_ranks import Listener
from torch.distributed import HashStore

SECRET = b"a secret of two machines"


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
    kept_alive = [link._connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for link in links]
    assert kept_alive == [1, 1], "a rank that waits for its first step finds out that the engine's machine is gone"
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


@pytest.mark.parametrize(
    ("size", "rest", "reason"),
    [(2, b"{}" + b"\0" * 32, "it does not know the secret"), ((1 << 32) - 1, b"", "a greeting that is too long")],
    ids=["no proof", "gigabytes"],
)
def test_a_stranger_learns_nothing(
    listener: tuple[Listener, tuple[str, int]], size: int, rest: bytes, reason: str
) -> None:
    """Without a proof it gets none, and it cannot have gigabytes read before one."""
    waits, address = listener
    with socket.create_connection(address, PATIENCE_S) as stranger:
        stranger.sendall(b"n" * 32 + size.to_bytes(4, "little") + rest)
        received = b""
        while part := stranger.recv(4096):
            received += part
    assert len(received) == 19 + 32 and reason in waits._refused


def test_an_engine_short_of_descriptors_still_waits_for_ranks(
    listener: tuple[Listener, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, address = listener
    accepting, failures = waits._socket, iter([OSError(errno.EMFILE, "Too many open files")] * 2)

    class Short:
        def accept(self) -> object:
            if (failure := next(failures, None)) is not None:
                raise failure
            return accepting.accept()

    monkeypatch.setattr(waits, "_socket", Short())
    wait_until(lambda: "Too many open files" in waits._refused, "the reason for which no rank comes")
    assert reply_of(connect(address, SECRET, hello())) == ""


def test_an_engine_short_of_threads_still_waits_for_ranks(
    listener: tuple[Listener, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, address = listener

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for _ in range(remote_ranks._MAX_STRANGERS + 1):
            assert not read_or_end(socket.create_connection(address, 30))
    assert "can't start new thread" in waits._refused
    assert reply_of(connect(address, SECRET, hello())) == ""


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
    assert far.gettimeout() is None, "what is sent may take longer than what was waited for"
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


def test_a_link_of_many_open_files() -> None:
    """A process that uses the engine as a library may have more than `select` can name."""
    one, _, near, far = pair()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = 1500
    if most != resource.RLIM_INFINITY and most <= number:
        pytest.skip("so many files may not be open here")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], number + 1), most))
    try:
        with socket.socket(fileno=fcntl.fcntl(far.fileno(), fcntl.F_DUPFD, number)) as high:
            other = Link(high, b"l" * 32, b"k" * 32, None)
            assert not other.has_data(0.0)
            one.send(b"first")
            assert other.has_data(PATIENCE_S) and other.receive(PATIENCE_S) == b"first"
            near.shutdown(socket.SHUT_RDWR)
            assert other.has_data(None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    other.close()
    with pytest.raises((OSError, ValueError)):
        other.has_data(0.0)


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
