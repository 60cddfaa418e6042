"""The bound of the memory of all requests, in the engine's process and in the library: every end gives it back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import backend_wire
import pytest
from engine_peer import Backend, InThread
from patience import wait_until
from slipstream import LLM, SamplingParams
from slipstream.core import request_memory
from slipstream.core.errors import CapacityError, RequestError
from slipstream.core.request import Request
from slipstream.engine.engine import Engine
from slipstream.protocol import wire
from slipstream.protocol.wire import ErrorCode, FrameType, ResponseFlag

PROMPT = "x = 1\n" * 40
LIMIT = 400_000
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture
def every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of any size are counted."""
    monkeypatch.setattr(request_memory, "MAX_UNCOUNTED_BYTES", 0)


@pytest.fixture
def served(backend: Backend, demo_model: Path) -> InThread:
    return InThread(backend, demo_model, max_num_seqs=2, max_waiting_requests=2, max_total_request_bytes=LIMIT)


def engine_of(served: InThread) -> Engine:
    return served.server._engine


def wait_free(served: InThread) -> None:
    wait_until(lambda: engine_of(served).request_memory.num_bytes == 0, "the memory to be given back")


def wait_taken(served: InThread, num_requests: int) -> None:
    """Each by an own handle."""
    taken = engine_of(served).request_memory._taken
    wait_until(lambda: len(taken) == num_requests, f"{num_requests} requests to be counted")


def text_of(responses: list[backend_wire.Response]) -> bytes:
    assert responses[-1].flags & ResponseFlag.FINAL and not responses[-1].error_code
    return b"".join(data[4:] for response in responses for _, _, data in response.outputs)


@pytest.mark.usefixtures("every_byte")
def test_every_end_gives_the_memory_back(backend: Backend, served: InThread) -> None:
    served.slow_down(0.005)
    backend.request(1, 20, PROMPT)
    wait_taken(served, 1)
    text = text_of(backend.responses_of(1)).decode()
    wait_free(served)

    backend.request(2, 20, PROMPT, n=2, stream=False)
    wait_taken(served, 1)
    backend.responses_of(2)
    wait_free(served)

    backend.request(3, 1500, PROMPT, stop=text[:3])
    assert len(backend.responses_of(3)) < 20, "its own text has ended it"
    wait_free(served)

    backend.request(4, 1500, PROMPT, timeout_ms=100)
    backend.responses_of(4)
    wait_free(served)


@pytest.mark.usefixtures("every_byte")
def test_cancels_and_refusals_give_it_back_and_what_waits_keeps_it(backend: Backend, served: InThread) -> None:
    served.slow_down(0.005)
    for handle in range(1, 5):
        backend.request(handle, 1500, PROMPT)
        wait_taken(served, handle)
    backend.request(5, 5, PROMPT)  # two run and two wait
    [refused] = backend.responses_of(5)
    assert refused.error_code == ErrorCode.UNAVAILABLE and "max_waiting_requests=2" in refused.error_message
    backend.request(6, 0, PROMPT, temprature=1)
    assert backend.responses_of(6)[-1].error_code == ErrorCode.INVALID_ARG
    wait_taken(served, 4)
    for handle in (4, 1, 3, 2):  # one that waits, one that runs, ...
        backend.connection.sendall(backend_wire.encode_cancel(handle))
    wait_free(served)


@pytest.mark.usefixtures("every_byte")
def test_errors_and_answers_that_are_too_large_give_it_back(
    backend: Backend, served: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.slow_down(0.005)
    fail = engine_of(served)._fail
    expire = engine_of(served).scheduler.expire

    def expire_with_error(now: float) -> list:
        found = expire(now)
        for request in list(engine_of(served).scheduler.live_requests):
            if request.request_id == "fails" and request.num_output_tokens > 3 and request.sequence_index == 1:
                fail(request, CapacityError("made up"), found)
        return found

    monkeypatch.setattr(engine_of(served).scheduler, "expire", expire_with_error)
    backend.request(1, 500, PROMPT, request_id="fails", n=2)
    wait_taken(served, 1)
    assert "made up" in backend.responses_of(1)[-1].error_message
    wait_free(served)
    wait_until(lambda: not engine_of(served).has_work, "its other sequence to end")

    monkeypatch.setattr(wire, "MAX_RESPONSE_BYTES", 1000)
    backend.request(2, 1000, PROMPT, stream=False)
    assert "1000" in backend.responses_of(2)[-1].error_message
    wait_free(served)


def test_a_flood_of_large_requests_is_refused_beside_a_stream(backend: Backend, demo_model: Path) -> None:
    served = InThread(backend, demo_model, max_num_seqs=4, max_total_request_bytes=LIMIT)
    served.slow_down(0.005)
    ids = [word_id % 3000 + 300 for word_id in range(16_000)]
    large = str([ids[:3000], [3000] + [-1] * 2999])  # a word of 180 kB of memory
    too_large = str([ids, [16 * (place + 1) for place in range(1000)] + [-1] * 15_000])
    backend.request(1, 300)
    quiet = text_of(backend.responses_of(1))
    backend.request(2, 300)
    wait_until(lambda: engine_of(served).scheduler.num_running == 1, "the victim to run")
    flood = range(10, 40)
    for handle in flood:
        backend.request(handle, 1500, stop_words_list=large)
    backend.request(40, 5, stop_words_list=too_large)
    backend.request(41, 5)  # small
    answers: dict[int, list[backend_wire.Response]] = {}
    while len(answers) < 33 or not all(answers[handle][-1].flags & ResponseFlag.FINAL for handle in (2, 41)):
        for response in backend_wire.decode_responses(backend.next(FrameType.RESPONSES)):
            answers.setdefault(response.handle, []).append(response)
        assert engine_of(served).request_memory.num_bytes <= LIMIT
    assert text_of(answers[2]) == quiet and text_of(answers[41])
    refused = {handle: answers[handle][0] for handle in flood if answers[handle][0].error_code}
    assert len(refused) == 28, "there is room for two"
    assert {one.error_code for one in refused.values()} == {ErrorCode.UNAVAILABLE}
    told = r"^3\d{5} bytes of 2 requests are in memory, this has 1\d{5} more, 180\d{3} of them for its stop_words_ids; "
    assert all(re.search(told + f"max_total_request_bytes={LIMIT}$", one.error_message) for one in refused.values())
    [alone] = answers[40]
    assert alone.error_code == ErrorCode.INVALID_ARG and alone.error_message.startswith("stop_words_ids: has 1060000 ")


def test_answers_that_gather_log_probabilities_are_few_at_a_time(backend: Backend, demo_model: Path) -> None:
    """Each of these would gather 135 kB of them; streams and answers without gather next to nothing."""
    served = InThread(backend, demo_model, max_num_seqs=8, max_total_request_bytes=LIMIT)
    served.slow_down(0.005)
    for handle in range(1, 5):
        backend.request(handle, 100, PROMPT, logprobs=9, stream=False)
    backend.request(5, 100, PROMPT, logprobs=9)
    backend.request(6, 100, PROMPT, stream=False)
    backend.request(7, 1000, PROMPT, logprobs=9, stream=False)
    answers: dict[int, list[backend_wire.Response]] = {}
    while not all(handle in answers and answers[handle][-1].flags & ResponseFlag.FINAL for handle in range(1, 8)):
        for response in backend_wire.decode_responses(backend.next(FrameType.RESPONSES)):
            answers.setdefault(response.handle, []).append(response)
        assert engine_of(served).request_memory.num_bytes <= LIMIT
    told = {handle: found[-1].error_message for handle, found in answers.items() if found[-1].error_code}
    assert sorted(told) == [3, 4, 7], "there is room for two"
    assert all(answers[handle][-1].error_code == ErrorCode.UNAVAILABLE for handle in (3, 4))
    more = r"bytes of 2 requests are in memory, this has \d+ more, 139000 of them for its logprobs; "
    assert all(re.search(more + f"max_total_request_bytes={LIMIT}$", told[handle]) for handle in (3, 4))
    assert answers[7][-1].error_code == ErrorCode.INVALID_ARG and told[7].startswith("logprobs: has 1390000 bytes")
    wait_free(served)


@pytest.fixture
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama), device="cpu", num_blocks=128, max_total_request_bytes=50_000) as llm:
        yield llm


@pytest.mark.usefixtures("every_byte")
def test_the_library_serves_more_than_the_bound_in_turn(llm: LLM) -> None:
    prompts = [[number % 400 + 5 for number in range(start, start + 400)] for start in range(9)]  # two at a time
    memory, most = llm.engine.request_memory, []
    submit = llm.engine.submit

    def watched(request: Request) -> list[Request]:
        try:
            return submit(request)
        finally:
            most.append(memory.num_bytes)

    llm.engine.submit = watched  # type: ignore[method-assign]
    answers = llm.generate(prompts, GREEDY)
    assert [len(answer.token_ids) for answer in answers] == [4] * 9 and max(most) == 2 * 48 * 400
    assert memory.num_bytes == 0
    beams = llm.generate(prompts[:3], replace(GREEDY, beam_width=4, n=2))
    assert [len(answer.token_ids) for answer in beams] == [4] * 6 and max(most) == 400 * (40 + 9 * 8)
    assert memory.num_bytes == 0
    for _ in llm.stream(prompts[0], replace(GREEDY, max_tokens=50)):
        assert memory.num_bytes == 48 * 400
        break
    assert memory.num_bytes == 0
    with pytest.raises(RequestError, match=r"^prompt: has 67200 bytes in memory, the request 67200; accepted: "):
        llm.generate([prompts[0]], replace(GREEDY, n=16))
    assert memory.num_bytes == 0 and not llm.engine.has_work
