"""Paths that need no key, and small answers: whoever asks for them costs other clients nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from fake_triton import FakeTriton
from gateway import GatewayProcess
from patience import PATIENCE_S
from slipstream.server.serve import listen
from slipstream.server.shared_call import SharedCall

HELD_S = 1.5


class SlowMetrics:
    """Takes connections and answers each after HELD_S."""

    def __init__(self) -> None:
        self.num_asked = 0
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/metrics"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self.num_asked += 1
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.recv(65536)
            time.sleep(HELD_S)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\nconnection: close\r\n\r\nslow_x 1")

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def slow_metrics() -> Iterator[SlowMetrics]:
    slow = SlowMetrics()
    yield slow
    slow.close()


def test_slow_metrics_of_triton_hold_up_no_answer(fake_triton: FakeTriton, slow_metrics: SlowMetrics) -> None:
    with GatewayProcess(fake_triton.url, ["--metrics-url", slow_metrics.url, "--log-level", "error"]) as gateway:
        shown: list[str] = []
        scrapers = [threading.Thread(target=lambda: shown.append(gateway.get("/metrics")[1])) for _ in range(40)]
        for scraper in scrapers:
            scraper.start()
        time.sleep(0.3)
        asked = {"model": "plain", "messages": [{"role": "user", "content": json.dumps({"pieces": ["x"]})}]}
        request = urllib.request.Request(
            f"{gateway.url}/v1/chat/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
        )
        started = time.monotonic()
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
            assert reply.status == 200
        assert time.monotonic() - started < HELD_S
        for scraper in scrapers:
            scraper.join()
    assert slow_metrics.num_asked <= 3
    assert len(shown) == 40 and all(text.endswith("slow_x 1") and "slipstream_gateway_" in text for text in shown)


def test_those_who_wait_share_a_call() -> None:
    calls: list[int] = []

    def make() -> int:
        calls.append(1)
        time.sleep(0.05)
        return len(calls)

    async def ask(shared: SharedCall[int]) -> list[int]:
        first = await asyncio.gather(*(shared.result() for _ in range(20)))
        return [*first, await shared.result()]

    assert asyncio.run(ask(SharedCall(make))) == [1] * 20 + [2]
    assert asyncio.run(ask(SharedCall(make, is_kept=True))) == [3] * 21


def test_a_call_goes_on_for_the_others_if_one_leaves() -> None:
    async def ask() -> int:
        shared = SharedCall(lambda: time.sleep(0.05) or 7)
        leaving, staying = asyncio.create_task(shared.result()), asyncio.create_task(shared.result())
        await asyncio.sleep(0.01)
        leaving.cancel()
        return await staying

    assert asyncio.run(ask()) == 7


def test_the_schema_of_the_api(open_gateway: GatewayProcess) -> None:
    status, text = open_gateway.get("/openapi.json")
    assert status == 200 and {"/v1/chat/completions", "/metrics"} <= set(json.loads(text)["paths"])


def test_small_answers_leave_at_once() -> None:
    """Else the kernel keeps a packet until the client has acknowledged the last one: 40 ms."""

    async def accepted() -> int:
        sent_at_once: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            sent_at_once.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listening = listen("127.0.0.1", 0)
        async with await asyncio.start_server(note, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            found = await sent_at_once
            writer.close()
            return found

    assert asyncio.run(accepted())


def test_triton_is_asked_once_however_many_ask_whether_it_is_ready(
    fake_triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    with GatewayProcess(fake_triton.url, ["--log-level", "error"]) as gateway:
        monkeypatch.setattr(fake_triton, "live_s", 0.5)
        monkeypatch.setattr(fake_triton, "num_live", 0)
        found: list[int] = []
        asking = [threading.Thread(target=lambda: found.append(gateway.get("/ready")[0])) for _ in range(40)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert found == [200] * 40 and 1 <= fake_triton.num_live <= 8
