"""The folder of a gateway's kept answers: it goes when the gateway ends, or when the next one starts."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import urllib.request
from pathlib import Path

import psutil
import pytest
from fake_triton import FakeTriton
from gateway import GatewayProcess
from patience import PATIENCE_S, wait_until
from slipstream.server.shared_folder import LOCK, PREFIX, hold, remove_abandoned, shared_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of this process and of those that it starts."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def folders(temporary: Path) -> list[Path]:
    return list(temporary.glob(f"{PREFIX}*"))


def keep_an_answer(running: GatewayProcess, temporary: Path) -> None:
    body = {"model": "plain", "input": '{"pieces": ["a secret"]}'}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{running.url}/v1/responses", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        assert json.load(reply)["store"] is True
    assert any(any((folder / "responses").iterdir()) for folder in folders(temporary))


def runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_no_answer_is_left_behind(
    fake_triton: FakeTriton, temporary: Path, workers: int, number: signal.Signals, status: int
) -> None:
    arguments = ["--workers", str(workers), "--log-level", "warning"]
    with GatewayProcess(fake_triton.url, arguments) as running:
        keep_an_answer(running, temporary)
        running.process.send_signal(number)
        assert running.process.wait(PATIENCE_S) == (status if workers == 1 else 0)
        assert folders(temporary) == []


def test_the_next_gateway_removes_what_a_killed_one_left(fake_triton: FakeTriton, temporary: Path) -> None:
    """Not before the last of its workers has ended, and never a folder that is in use."""
    with GatewayProcess(fake_triton.url, ["--workers", "2", "--log-level", "warning"]) as killed:
        keep_an_answer(killed, temporary)
        [left] = folders(temporary)
        workers = psutil.Process(killed.process.pid).children(recursive=True)
        killed.process.kill()
        killed.process.wait()
    with GatewayProcess(fake_triton.url, ["--log-level", "warning"]) as other:
        assert left in folders(temporary), "its workers still serve"
        [own] = set(folders(temporary)) - {left}
        for worker in workers:
            worker.kill()
        wait_until(lambda: not any(map(runs, workers)), "the workers to end")
        with GatewayProcess(fake_triton.url, ["--log-level", "warning"]):
            assert left not in folders(temporary) and own in folders(temporary)
            keep_an_answer(other, temporary)
    assert folders(temporary) == []


def test_only_abandoned_folders_of_ones_own_are_removed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("abandoned", "without-lock", "target")
    abandoned, without, target = (temporary / f"{PREFIX if name != 'target' else ''}{name}" for name in names)
    for folder in (abandoned, without, target):
        (folder / "responses").mkdir(parents=True)
    for folder in (abandoned, target):
        (folder / LOCK).touch()
    link = temporary / f"{PREFIX}link"
    link.symlink_to(target)
    with shared_folder() as held:
        assert not abandoned.exists(), "by the start of another"
        assert held.stat().st_mode & 0o077 == 0
        remove_abandoned(temporary)
        assert held.exists() and without.exists() and link.is_symlink() and (target / LOCK).exists()
    assert not held.exists()
    abandoned.mkdir()
    (abandoned / LOCK).touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        remove_abandoned(temporary)
    assert abandoned.exists(), "it is another user's"
    hold(abandoned)
    remove_abandoned(temporary)
    assert abandoned.exists()
