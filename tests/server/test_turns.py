"""Large requests are read one at a time: what one costs the event loop, the others do not wait for at once."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import urllib.error
import urllib.request
from contextlib import closing
from http.client import HTTPResponse

import pytest
from gateway import GatewayProcess
from patience import PATIENCE_S
from slipstream.server import turns as turns_module
from slipstream.server.turns import MAX_READ_AT_ONCE_BYTES, Turn, Turns

LARGE = {"unknown": "a" * MAX_READ_AT_ONCE_BYTES}
SCRIPT = json.dumps({"pieces": ["x"]})
TURNS = [{"role": "user", "content": SCRIPT}]
HELD = [{"role": "user", "content": json.dumps({"pieces": ["x"], "hang": True})}]
CHAT = "/v1/chat/completions"
REQUESTS = [
    (CHAT, {"model": "plain", "messages": TURNS}, 200),
    (CHAT, {"model": "plain", "messages": TURNS, "stream": True}, 200),
    (CHAT, {"model": "plain", "messages": 1}, 400),
    (CHAT, {"model": "none", "messages": TURNS}, 404),
    ("/v1/completions", {"model": "plain", "prompt": SCRIPT}, 200),
    ("/v1/responses", {"model": "plain", "input": SCRIPT}, 200),
    ("/v1/messages", {"model": "plain", "messages": TURNS, "max_tokens": 5}, 200),
    ("/v1/messages/count_tokens", {"model": "thinking", "messages": TURNS}, 200),
    ("/tokenize", {"model": "thinking", "prompt": "x"}, 200),
    ("/v1/embeddings", {"model": "encoder", "input": "x"}, 200),
    ("/v1/rerank", {"model": "encoder", "query": "x", "documents": ["y"]}, 200),
    ("/v1/nothing", {}, 404),
]


def test_a_turn_begins_behind_the_last_one_and_its_pause() -> None:
    async def read() -> list[float]:
        turns, begun = Turns(), list[float]()

        async def one() -> None:
            turn = await turns.take(b"", 1)
            begun.append(time.monotonic())
            await asyncio.sleep(0.03)
            turn.end()
            turn.end()

        await asyncio.gather(*(one() for _ in range(4)))
        return begun

    begun = asyncio.run(read())
    assert len(begun) == 4 and all(later - earlier >= 0.058 for earlier, later in itertools.pairwise(begun))


def test_keys_have_turns_one_after_the_other_and_shorter_bodies_come_first() -> None:
    async def read() -> list[str]:
        turns, order = Turns(), list[str]()

        async def one(name: str, owner: bytes, num_bytes: int) -> None:
            turn = await turns.take(owner, num_bytes)
            order.append(name)
            turn.end()

        first = await turns.take(b"a", 1)
        flood = [asyncio.create_task(one(f"a{index}", b"a", 4 << 20)) for index in range(5)]
        await asyncio.sleep(0)
        others = [one("b", b"b", 4 << 20), one("c", b"c", 4 << 20), one("short", b"a", 1), one("b2", b"b", 1 << 20)]
        tasks = [*flood, *map(asyncio.create_task, others)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        first.end()
        await asyncio.wait(tasks)
        last = await asyncio.wait_for(turns.take(b"a", 1), PATIENCE_S)
        last.end()
        return order

    assert asyncio.run(read()) == ["short", "b2", "c", "a0", "b", "a2", "a3", "a4"]


def test_a_turn_that_its_request_does_not_live_to_see_is_given_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "_MAX_PAUSE_S", 0.0)

    async def read() -> None:
        turns = Turns()
        first = await turns.take(b"a", 1)
        doomed = asyncio.create_task(turns.take(b"a", 1))
        waiting = asyncio.create_task(turns.take(b"b", 2))
        await asyncio.sleep(0)
        first.end()
        asyncio.get_running_loop().call_later(0, doomed.cancel)  # behind the end: it has its turn, and has not run
        assert isinstance(await asyncio.wait_for(waiting, PATIENCE_S), Turn)
        assert doomed.cancelled()

    asyncio.run(read())


def post(gateway: GatewayProcess, path: str, fields: dict) -> HTTPResponse:
    body = json.dumps({**fields, **LARGE}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer sk-right"}
    request = urllib.request.Request(gateway.url + path, body, headers)
    return urllib.request.urlopen(request, timeout=PATIENCE_S)


def test_every_way_out_of_a_request_ends_its_turn(fake_gateway: GatewayProcess) -> None:
    for path, fields, status in 3 * REQUESTS:  # to both of its workers
        try:
            found = post(fake_gateway, path, fields).status
        except urllib.error.HTTPError as error:
            found = error.code
        assert found == status, path


def test_an_answer_under_way_has_no_turn(open_gateway: GatewayProcess) -> None:
    with closing(post(open_gateway, CHAT, {"model": "plain", "messages": HELD, "stream": True})):
        assert post(open_gateway, CHAT, {"model": "plain", "messages": TURNS}).status == 200
