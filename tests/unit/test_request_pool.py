"""Large requests wait for a thread of their own: in an order, within bounds, and deaf to nothing."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import toy_tokenizers
from patience import wait_until
from slipstream.core.config import EngineConfig, ServingConfig
from slipstream.core.errors import CapacityError, RequestError
from slipstream.core.request import FinishReason
from slipstream.engine.request_pool import MAX_BESIDE_BYTES, RequestPool, num_bytes
from slipstream.protocol import wire
from slipstream.protocol.unread_request import encode_unread, peek
from slipstream.tokenizer.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer(toy_tokenizers.byte_level())


def large(handle: int, size: int = 9000) -> wire.Request:
    return wire.Request(handle, 0, 0, "", (), (wire.Tensor("text_input", 13, (1,), bytes(size)),), {})


class Steps:
    """Writes down what happens; reads nothing before `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.read: list[int] = []
        self.delivered: list[int] = []
        self.ended: list[tuple[int, FinishReason]] = []
        self.cancels: list[int] = []

    def parse(self, raw: wire.Request) -> Any:
        self.read.append(raw.handle)
        assert self.go.wait(30)
        return raw.handle

    def deliver(self, handle: int, parsed: Any) -> None:
        assert parsed == handle
        self.delivered.append(handle)

    def end(self, handle: int, known: Any, reason: FinishReason) -> None:
        assert known == f"known of {handle}"
        self.ended.append((handle, reason))

    def cancelled(self, handle: int) -> None:
        self.cancels.append(handle)


@pytest.fixture
def steps() -> Steps:
    return Steps()


def start(steps: Steps, max_requests: int = 10, max_bytes: int = 1 << 20) -> RequestPool:
    pool = RequestPool(steps, max_requests, max_bytes)
    pool.put(large(1), None, "known of 1")
    wait_until(lambda: steps.read == [1], "the first to be read")
    return pool


def test_they_are_read_in_order(steps: Steps) -> None:
    pool = start(steps)
    for handle in (5, 3, 4):
        pool.put(large(handle), None)
    steps.go.set()
    assert pool.wait_empty(30) and pool.is_empty
    assert steps.delivered == [1, 5, 3, 4] and not steps.ended


def test_short_ones_are_read_before_long_ones_that_came_a_little_earlier(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some that take seconds each would hold up all that come after them; and none waits for ever."""
    pool, now = start(steps, max_bytes=1 << 30), time.monotonic()
    sent = [(0.0, 2, 8 << 20), (0.1, 3, 8 << 20), (0.2, 4, 9000), (7.0, 5, 1 << 20), (8.0, 6, 9000), (8.1, 7, 1 << 20)]
    for seconds, handle, size in sent:
        monkeypatch.setattr(time, "monotonic", lambda at=now + seconds: at)
        pool.put(large(handle, size), None)
    monkeypatch.undo()
    steps.go.set()
    assert pool.wait_empty(30)
    assert steps.delivered == [1, 4, 2, 5, 6, 3, 7]


def test_short_ones_are_read_beside_one_that_takes_long(steps: Steps) -> None:
    """10 MB of the longest tokens are a valid prompt, which takes seconds; a second long one waits for it."""
    pool = RequestPool(steps, 10, 1 << 30)
    gates = {handle: threading.Event() for handle in (1, 2, 3, 4)}

    def parse(raw: wire.Request) -> Any:
        steps.read.append(raw.handle)
        assert gates[raw.handle].wait(30)
        return raw.handle

    steps.parse = parse  # type: ignore[method-assign]
    pool.put(large(1, MAX_BESIDE_BYTES + 1), None, "known of 1")
    wait_until(lambda: steps.read == [1], "the long one to be read")
    pool.put(large(2, MAX_BESIDE_BYTES + 1), None, "known of 2")
    pool.put(large(3, MAX_BESIDE_BYTES), None, "known of 3")
    wait_until(lambda: steps.read == [1, 3], "the short one to be read beside it")
    pool.put(large(4), None, "known of 4")
    assert pool.cancel(3) and pool.cancel(1), "each of the two that are being read hears of it"
    gates[3].set()
    wait_until(lambda: steps.ended == [(3, FinishReason.CANCELLED)], "the one that was cancelled to be ended")
    wait_until(lambda: steps.read == [1, 3, 4], "the next short one to be read beside it, too")
    gates[4].set()
    wait_until(lambda: steps.delivered == [4], "it to be delivered")
    assert steps.read == [1, 3, 4], "one long one at a time"
    gates[1].set()
    gates[2].set()
    assert pool.wait_empty(30)
    assert steps.read == [1, 3, 4, 2] and steps.delivered == [4, 2]
    assert steps.ended[1:] == [(1, FinishReason.CANCELLED)]


def test_short_ones_wait_for_each_other_while_nothing_takes_long(steps: Steps) -> None:
    pool = start(steps)
    pool.put(large(2), None, "known of 2")
    time.sleep(0.05)
    assert steps.read == [1]
    steps.go.set()
    assert pool.wait_empty(30) and steps.delivered == [1, 2]


def test_a_cancel_is_heard_at_once_while_a_request_waits_and_after_it_was_read(steps: Steps) -> None:
    pool = start(steps)
    pool.put(large(2), None, "known of 2")
    assert pool.cancel(2) and steps.ended == [(2, FinishReason.CANCELLED)]
    assert not pool.cancel(2) and not pool.cancel(77), "not here: the engine's business"
    assert pool.cancel(1) and pool.cancel(1)
    steps.go.set()
    assert pool.wait_empty(30)
    wait_until(lambda: len(steps.ended) == 2, "the one that was being read to be ended")
    assert steps.ended[1] == (1, FinishReason.CANCELLED) and not steps.delivered and not steps.cancels


def test_a_cancel_during_delivery_is_passed_on(steps: Steps) -> None:
    pool = start(steps)
    deliver = steps.deliver

    def cancelled_meanwhile(handle: int, parsed: Any) -> None:
        deliver(handle, parsed)
        assert pool.cancel(handle)

    steps.deliver = cancelled_meanwhile  # type: ignore[method-assign]
    steps.go.set()
    wait_until(lambda: steps.cancels == [1], "the cancel to be passed on")
    assert steps.delivered == [1] and not steps.ended


def test_a_deadline_passes_while_a_request_waits(steps: Steps) -> None:
    pool = start(steps)
    pool.put(large(2), time.monotonic() + 0.02, "known of 2")
    pool.put(large(3), time.monotonic() + 60, "known of 3")
    time.sleep(0.03)
    pool.expire()
    assert steps.ended == [(2, FinishReason.TIMEOUT)]
    pool.put(large(4), time.monotonic() - 1, "known of 4")
    steps.go.set()
    assert pool.wait_empty(30)
    assert steps.delivered == [1, 3] and 4 not in steps.read, "late ones are not read when their turn comes"


def test_there_is_an_end_to_what_waits(steps: Steps) -> None:
    pool = start(steps, max_requests=2, max_bytes=30000)
    with pytest.raises(
        CapacityError, match=r"1 requests of 9000 bytes .* this has 21001; .*max_tokenizing_bytes=30000"
    ):
        pool.put(large(2, 21001), None, "known of 2")
    pool.put(large(2, 21000), None, "known of 2")
    with pytest.raises(CapacityError, match=r"2 requests of 30000 bytes wait .*max_waiting_requests=2"):
        pool.put(large(3, 0), None, "known of 3")
    assert pool.cancel(2)
    pool.put(large(3, 21000), None, "known of 3")
    steps.go.set()
    assert pool.wait_empty(30) and steps.delivered == [1, 3]


def test_one_is_taken_where_none_may_wait_and_refused_where_none_of_its_size_may(steps: Steps) -> None:
    """An idle model reads it at once; what has no room there has none later either."""
    pool = start(steps, max_requests=0, max_bytes=9000)
    with pytest.raises(CapacityError, match="1 requests of 9000 bytes wait"):
        pool.put(large(2, 0), None, "known of 2")
    with pytest.raises(RequestError, match="has 9001 bytes, accepted: at most max_tokenizing_bytes=9000"):
        pool.put(large(3, 9001), None, "known of 3")
    steps.go.set()
    assert pool.wait_empty(30) and steps.delivered == [1]


def test_a_deadline_that_passes_on_the_way_to_the_engine_is_the_engines(steps: Steps) -> None:
    pool = RequestPool(steps, 10, 1 << 20)
    deliver = steps.deliver

    def late(handle: int, parsed: Any) -> None:
        deliver(handle, parsed)
        time.sleep(max(0.0, deadline - time.monotonic()))
        pool.expire()

    steps.deliver = late  # type: ignore[method-assign]
    steps.go.set()
    deadline = time.monotonic() + 0.5
    pool.put(large(1), deadline, "known of 1")
    assert pool.wait_empty(30)
    assert steps.delivered == [1] and not steps.ended, "answered twice"


def test_one_that_comes_late_to_an_idle_thread_is_not_read(steps: Steps) -> None:
    steps.go.set()
    pool = start(steps)
    assert pool.wait_empty(30)
    pool.put(large(2), time.monotonic() - 1, "known of 2")
    assert pool.wait_empty(30)
    wait_until(lambda: steps.ended == [(2, FinishReason.TIMEOUT)], "the late one to be ended")
    assert steps.read == [1]


def test_nothing_is_taken_when_the_backend_is_gone(steps: Steps) -> None:
    def gone(handle: int, parsed: Any) -> None:
        raise BrokenPipeError

    steps.deliver = gone  # type: ignore[method-assign]
    pool = start(steps)
    pool.put(large(2), None, "known of 2")
    steps.go.set()
    assert pool.wait_empty(30)
    with pytest.raises(CapacityError, match="being unloaded"):
        pool.put(large(3), None, "known of 3")


def test_one_that_is_delivered_at_the_end_is_not_left(steps: Steps) -> None:
    """Delivery has answered it, or made it known to whoever answers: another answer would be the second."""
    pool = start(steps)
    pool.put(large(2), None, "known of 2")
    left: list[int] = []
    closing = threading.Thread(target=lambda: left.extend(pool.close()))
    deliver = steps.deliver

    def closed_meanwhile(handle: int, parsed: Any) -> None:
        closing.start()
        closing.join(0.2)
        deliver(handle, parsed)

    steps.deliver = closed_meanwhile  # type: ignore[method-assign]
    steps.go.set()
    wait_until(lambda: steps.delivered == [1], "the first to be delivered")
    closing.join(30)
    assert left == [2] and steps.delivered == [1] and not steps.ended


def test_what_is_left_at_the_end_is_told_and_never_delivered(steps: Steps) -> None:
    pool = start(steps)
    pool.put(large(2), None, "known of 2")
    assert not pool.wait_empty(0.01)
    assert pool.cancel(1), "while it is read; its answer is the caller's all the same"
    assert pool.close() == [1, 2]
    steps.go.set()
    with pytest.raises(CapacityError, match="being unloaded"):
        pool.put(large(3), None, "known of 3")
    assert not pool.cancel(1)
    time.sleep(0.05)
    assert not steps.delivered and not steps.ended


@pytest.mark.parametrize("num_started", [0, 1])
def test_without_a_thread_to_read_it_a_request_is_refused_and_nothing_of_it_is_left(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, num_started: int
) -> None:
    """It was refused and kept: with one thread it was answered twice, with none all that came later waited for ever."""
    threads, start_thread = iter(range(num_started)), threading.Thread.start

    def start_few(thread: threading.Thread) -> None:
        if next(threads, None) is None:
            raise RuntimeError("can't start new thread")
        start_thread(thread)

    steps.go.set()
    pool = RequestPool(steps, 1, 1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_few)
        for _ in range(2):
            with pytest.raises(CapacityError, match="can't start new thread"):
                pool.put(large(1), None, "known of 1")
    assert pool.is_empty and pool.close() == []
    pool = RequestPool(steps, 1, 1 << 20)
    pool.put(large(2), None, "known of 2")
    assert pool.wait_empty(30)
    assert steps.delivered == [2]


@pytest.mark.parametrize("given", [{"n": 2}, {"stream": True}])
def test_one_that_would_have_two_responses_of_a_model_that_may_give_one_does_not_wait(given: dict[str, Any]) -> None:
    """If it were cancelled or late there, each sequence would have a response, though nobody has read it."""
    raw = replace(large(1), parameters=given)
    serving = ServingConfig(is_decoupled=False, max_batch_size=1)
    with pytest.raises(RequestError, match=r"accepted: .*decoupled: false"):
        peek(raw, EngineConfig(serving=serving), TOKENIZER)
    known = peek(raw, EngineConfig(serving=replace(serving, is_decoupled=True)), TOKENIZER)
    assert known is not None and len(encode_unread(known, FinishReason.TIMEOUT)) == given.get("n", 1)


@pytest.mark.parametrize(("text", "most"), [("x" * 5000, 5000), ("x" * 4999 + "\U0001f600", 20000)])
def test_parameters_count_too_by_the_memory_that_they_take(text: str, most: int) -> None:
    raw = wire.Request(1, 0, 0, "", (), (), {"stop": text, "max_tokens": 3})
    assert most <= num_bytes(raw) < most + 100
