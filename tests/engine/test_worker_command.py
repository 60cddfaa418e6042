"""`slipstream worker`: which ranks a machine has, and what becomes of their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from pathlib import Path

import pytest
from patience import PATIENCE_S
from slipstream.commands import worker
from slipstream.core.errors import ConfigError

SECRET = b"a secret of two machines"


def ranks_here(given: list[str], **variables: str) -> list[tuple[object, ...]]:
    parser = ArgumentParser()
    worker.add_arguments(parser)
    found = worker.ranks_here(parser.parse_args(["--secret-file", "secret", *given]), variables)
    return [tuple(one[name] for name in ("host", "port", "rank", "world_size", "local_rank")) for one in found]


def test_which_ranks_a_worker_has() -> None:
    """By torchrun's variables, LeaderWorkerSet's, or options."""
    torchrun = {"MASTER_ADDR": "leader", "MASTER_PORT": "1234", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert ranks_here([], **torchrun) == [("leader", 1234, 3, 4, 1)]
    lws = {"LWS_LEADER_ADDRESS": "llm-0.llm", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
    expected = [("llm-0.llm", 29500, 2, 4, 0), ("llm-0.llm", 29500, 3, 4, 1)]
    assert ranks_here(["--ranks", "2"], **lws) == expected
    options = ["--address", "[fd00::1]:77", "--nodes", "2", "--node", "1", "--ranks", "1"]
    assert ranks_here(options) == [("fd00::1", 77, 1, 2, 0)]
    refused = [
        ([], {**torchrun, "RANK": "0"}, "RANK='0 of 4'"),
        ([], {**torchrun, "WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        (["--ranks", "9"], lws, "--ranks=9"),
        (["--address", "here"], lws, "--address='here'"),
        (["--ranks", "0"], lws, "--ranks=0: accepted: 1 to 4"),
        (["--ranks", "2", "--nodes", "5"], lws, "--nodes=5: accepted with --ranks 2: 2 to 4"),
        (["--ranks", "2", "--nodes", "0"], lws, "--nodes=0: accepted with --ranks 2: 2 to 4"),
        (["--ranks", "2", "--node", "2"], lws, "--node=2: accepted: 1 to 1"),
        ([], {**torchrun, "MASTER_PORT": "port"}, "--address='leader:port'"),
        (["--address", "here:" + "9" * 5000], lws, "--address='here:9+': accepted: HOST:PORT"),
        (["--address", "here:1"], {}, "--nodes"),
        (["--nodes", "2", "--node", "1"], {}, "MASTER_ADDR"),
    ]
    for given, variables, reason in refused:
        with pytest.raises(ConfigError, match=reason):
            ranks_here(given, **variables)


@pytest.mark.parametrize(("drain_timeout", "exit_status"), [("0", -signal.SIGKILL), ("300", 0)])
def test_what_sigterm_does_to_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, drain_timeout: str, exit_status: int
) -> None:
    """They end at once, or go on until the engine ends."""
    (tmp_path / "secret").write_bytes(SECRET)
    parser = ArgumentParser()
    worker.add_arguments(parser)
    options = ["--address", "engine:1", "--nodes", "2", "--node", "1", "--ranks", "1", "--drain-timeout"]
    given = ["--secret-file", str(tmp_path / "secret"), *options]
    looked = threading.Event()

    class LookedAt(subprocess.Popen[bytes]):
        def poll(self) -> int | None:
            looked.set()
            return super().poll()

    with LookedAt([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank:

        def stop() -> None:
            looked.wait(PATIENCE_S)
            os.kill(os.getpid(), signal.SIGTERM)
            if exit_status == 0:
                time.sleep(1)  # for a rank that is ended wrongly
                rank.communicate(b"the engine ends\n")

        def start(_: dict[str, object]) -> subprocess.Popen[bytes]:
            stopper.start()
            return rank

        stopper = threading.Thread(target=stop)

        monkeypatch.setattr(worker, "_start", start)
        before = signal.getsignal(signal.SIGTERM)
        try:
            assert worker.run(parser.parse_args([*given, drain_timeout])) == 0
        finally:
            signal.signal(signal.SIGTERM, before)
        stopper.join()
        assert rank.wait(PATIENCE_S) == exit_status
    with pytest.raises(ConfigError, match="--drain-timeout=-1: accepted: 0 to 86400 seconds"):
        worker.run(parser.parse_args([*given, "-1"]))


def test_sigterm_is_not_lost_while_a_rank_that_has_ended_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It came in the destructor of the process before, where Python ignores exceptions."""
    (tmp_path / "secret").write_bytes(SECRET)
    parser = ArgumentParser()
    worker.add_arguments(parser)
    options = ["--address", "engine:1", "--nodes", "2", "--node", "1", "--ranks", "1"]
    given = parser.parse_args(["--secret-file", str(tmp_path / "secret"), *options])
    pauses = 0

    class Ended:
        pid = os.getpid()

        def poll(self) -> int:
            return 1

        def kill(self) -> None:
            pass

        def __del__(self) -> None:
            if pauses == 1:
                signal.raise_signal(signal.SIGTERM)

    def pause(_: float) -> None:
        nonlocal pauses
        pauses += 1
        assert pauses < 3, "SIGTERM was lost"

    monkeypatch.setattr(worker, "_start", lambda _: Ended())
    monkeypatch.setattr(worker, "_PAUSE_S", -1.0)
    monkeypatch.setattr(worker, "_LOOK_S", 0.0)
    monkeypatch.setattr(worker.time, "sleep", pause)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert worker.run(given) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert pauses == 2


def test_a_rank_that_is_stopped_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It does not end with its connection, so the engine would wait for another one in vain."""
    (tmp_path / "secret").write_bytes(SECRET)
    parser = ArgumentParser()
    worker.add_arguments(parser)
    options = ["--address", "engine:1", "--nodes", "2", "--node", "1", "--ranks", "1"]
    given = parser.parse_args(["--secret-file", str(tmp_path / "secret"), *options])
    started: list[subprocess.Popen[bytes]] = []

    def start(_: dict[str, object]) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        if len(started) == 1:
            started[0].send_signal(signal.SIGSTOP)
        else:
            os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(worker, "_start", start)
    before, alarm = (
        signal.getsignal(signal.SIGTERM),
        threading.Timer(PATIENCE_S, os.kill, (os.getpid(), signal.SIGTERM)),
    )
    alarm.start()
    try:
        assert worker.run(given) == 0
    finally:
        alarm.cancel()
        signal.signal(signal.SIGTERM, before)
        for process in started:
            process.kill()
    assert [process.wait(PATIENCE_S) for process in started] == [-signal.SIGKILL] * 2
