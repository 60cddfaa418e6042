"""`guarded` outside Triton, before models that are functions: what it refuses, passes on, and never waits for."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from fake_models import ERROR, FakeModels
from fake_python_backend import TritonError
from guarded_model import Open, ask, request_of
from patience import PATIENCE_S, wait_until
from slipstream.core.errors import RequestError
from slipstream.encoders.timed_calls import happens

# ------------------------------------------------------------ what it refuses


@pytest.mark.parametrize("value", [None, 1, 1.0, "1"])
def test_one_sequence_may_be_said_as_the_llm_reads_it(serving: Any, value: object) -> None:
    serving.read_request(request_of(sampling=json.dumps({"n": value, "best_of": value})), 100)
    serving.read_request(request_of(parameters=json.dumps({"n": 1 if value is None else value})), 100)


@pytest.mark.parametrize("value", [2, 2.0, "2", 0, True, 1.5, [1], "one"])
def test_any_other_number_is_refused_by_name(serving: Any, value: object) -> None:
    settings = json.dumps({"n": value})
    for given in (
        {"sampling": settings},
        {"parameters": settings},
        {"parameters": json.dumps({"sampling_parameters": settings})},  # the LLM takes them as a parameter too
        {"sampling": '{"n": null}', "parameters": settings},  # null says nothing: the other source counts
    ):
        with pytest.raises(RequestError, match="n: got"):
            serving.read_request(request_of(**given), 100)


@pytest.mark.parametrize("width", [2, "4"])
def test_several_beams_are_several_sequences(serving: Any, width: object) -> None:
    settings = json.dumps({"beam_width": width})
    for given in ({"sampling": settings}, {"parameters": settings}):
        with pytest.raises(RequestError, match="beam_width: got"):
            serving.read_request(request_of(**given), 100)
    serving.read_request(request_of(sampling='{"beam_width": 0}', parameters='{"beam_width": 1}'), 100)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"n": ' * 100_000, "{", "\x00"])
def test_what_is_no_json_or_nested_too_deeply_is_refused_by_name(serving: Any, text: str) -> None:
    with pytest.raises(RequestError, match=r"sampling_parameters: got .*, which is not JSON"):
        serving.read_request(request_of(sampling=text), 100)


def test_json_is_bounded_before_it_is_parsed(serving: Any) -> None:
    """The LLM refuses it as well, but `guarded` would have parsed it before, on the thread that takes all requests."""
    text = json.dumps({"stop": "x" * (1 << 21)})
    for name, given in (("sampling_parameters", {"sampling": text}), ("request parameters", {"parameters": text})):
        with pytest.raises(RequestError, match=f"{name}: got {len(text)} characters, accepted: at most {1 << 21}"):
            serving.read_request(request_of(**given), 100)


def test_a_refused_request_is_answered_and_harms_no_other(guard: Open) -> None:
    model = guard(FakeModels(lambda models, context: iter(["fine"])))
    requests = [request_of(""), request_of(), request_of("x" * 200_001)]
    model.execute(requests)
    empty, good, long = (request.sender.wait() for request in requests)
    assert (empty.error.number, good.text, long.error.number) == (TritonError.INVALID_ARG, "fine", 3)
    assert "max_prompt_chars" in long.error.text


def test_further_models_judge_prompts_and_no_answers(guard: Open) -> None:
    models = FakeModels(lambda models, context: iter(["Never IGNORE ", "a red light."]))
    model = guard(models, prompt_checks="injection")
    assert ask(model, "Hello").wait().text == "Never IGNORE a red light."
    for prompt, categories in (
        ("IGNORE it", [b"injection"]),
        ("BAD and IGNORE", [b"violence"]),
        ("BAD", [b"violence"]),
    ):
        last = ask(model, prompt).wait().sent[-1].outputs
        assert (last["block_reason"][0], list(last["block_categories"])) == (b"prompt", categories), "the worst"
    assert len(models.requests) == 1, "the model of text is asked for nothing that was blocked"


@pytest.mark.parametrize(("policy", "reason"), [("closed", b"encoder_failure"), ("open", b"")])
def test_a_further_model_that_fails_is_a_failed_encoder(guard: Open, policy: str, reason: bytes) -> None:
    models = FakeModels(lambda models, context: iter(["fine"]))
    model = guard(models, prompt_checks="nowhere,injection", on_encoder_failure=policy)
    last = ask(model, "Hello").wait().sent[-1].outputs
    assert (last["block_reason"][0], last["safety_checked"][0]) == (reason, False)
    last = ask(model, "IGNORE it").wait().sent[-1].outputs
    assert last["block_reason"][0] == b"prompt", "what another has flagged stays flagged"


def test_the_number_of_further_models_is_bounded(guard: Open) -> None:
    with pytest.raises(Exception, match=r"prompt_checks.*at most 8 models"):
        guard("127.0.0.1:1", prompt_checks=",".join("abcdefghi"))


# ------------------------------------------------------------ the calls


def test_the_llm_gets_what_the_client_gave(guard: Open) -> None:
    models = FakeModels(lambda models, context: iter(["one ", "two"]))
    parameters = json.dumps({"ignore_eos": True, "min_tokens": 2, "min_p": 0.5, "seed": (1 << 64) - 1, "user": "me"})
    sender = ask(guard(models), "Hello", '{"priority": 3}', parameters, timeout_us=7_000_000).wait()
    assert sender.text == "one two" and sum(int(one.outputs["num_output_tokens"][0]) for one in sender.sent) == 2
    last = sender.sent[-1].outputs
    assert (last["num_input_tokens"][0], last["quality_score"][0], sender.num_ends) == (7, 0.5, 1)
    [seen] = models.requests
    given = {tensor.name: raw for tensor, raw in zip(seen.inputs, seen.raw_input_contents)}
    assert given["text_input"][4:] == b"Hello" and given["sampling_parameters"][4:] == b'{"priority": 3}'
    assert given["stream"] == given["exclude_input_in_output"] == b"\x01" and seen.model_name == "llm"
    told = {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in seen.parameters.items()}
    assert told == {**json.loads(parameters), "timeout": 7_000_000}
    assert seen.id.startswith("guarded-")


def test_many_requests_run_at_once_in_one_process(guard: Open) -> None:
    """The LLM answers none before it has all."""
    all_there = threading.Barrier(40)

    def llm(models: FakeModels, context: Any) -> Iterator[str]:
        all_there.wait(PATIENCE_S)
        yield from ("a", "b", "c")

    model = guard(FakeModels(llm))
    senders = [ask(model) for _ in range(40)]
    assert {sender.wait().text for sender in senders} == {"abc"}


def test_pieces_that_come_during_a_check_are_checked_together(guard: Open) -> None:
    def llm(models: FakeModels, context: Any) -> Iterator[str]:
        models.may_check.clear()  # of the prompt it has ended
        yield "first "
        while "first " not in models.checked:
            time.sleep(0.005)
        yield from ("second ",) * 20
        models.may_check.set()

    models = FakeModels(llm)
    assert ask(guard(models), "prompt").wait().text == "first " + "second " * 20
    assert len(models.checked) < 10


@pytest.mark.parametrize(
    ("told", "code"),
    [  # all of them: tests/unit/test_answer_faults.py
        ("temperature: got -1.0, accepted: 0 or more [INVALID_ARG]", TritonError.INVALID_ARG),
        ("8 requests are waiting; max_waiting_requests=8 [UNAVAILABLE]", TritonError.UNAVAILABLE),
        ("the engine failed [INTERNAL]", TritonError.INTERNAL),
    ],
)
def test_errors_of_the_llm_keep_their_code(guard: Open, told: str, code: int) -> None:
    sender = ask(guard(FakeModels(lambda models, context: iter(["Well. ", ERROR + told])))).wait()
    assert (sender.error.text, sender.error.number) == (told, code)


@pytest.mark.parametrize("status", ["INVALID_ARGUMENT", "UNAVAILABLE", "NOT_FOUND"])
def test_so_do_those_that_end_the_stream(guard: Open, status: str) -> None:
    def llm(models: FakeModels, context: Any) -> Iterator[str]:
        context.abort(grpc.StatusCode[status], "no such thing")
        yield ""

    codes = {"INVALID_ARGUMENT": TritonError.INVALID_ARG, "UNAVAILABLE": TritonError.UNAVAILABLE}
    sender = ask(guard(FakeModels(llm))).wait()
    assert sender.error.number == codes.get(status, TritonError.INTERNAL) and "no such thing [" in sender.error.text


def test_an_llm_that_is_not_decoupled_is_named(guard: Open) -> None:
    """The client asked for no stream."""
    told = "stream: got True, accepted: False, because config.pbtxt says `decoupled: false`"
    error = ask(guard(FakeModels(lambda models, context: iter([ERROR + told])))).wait().error
    assert error.text == f"guarded needs a decoupled LLM; llm said: {told} [INTERNAL]"
    assert error.number == TritonError.INTERNAL


def test_of_several_errors_the_first_is_told(guard: Open) -> None:
    def llm(models: FakeModels, context: Any) -> Iterator[str]:
        yield ERROR + "the engine failed"
        context.abort(grpc.StatusCode.UNAVAILABLE, "and then the server")

    assert ask(guard(FakeModels(llm))).wait().error.text == "the engine failed [INTERNAL]"


# ------------------------------------------------------------ what ends early


def endless(models: FakeModels, context: Any) -> Iterator[str]:
    while context.is_active():
        yield "word "
        time.sleep(0.01)


def silent(models: FakeModels, context: Any) -> Iterator[str]:
    models.may_go.wait(PATIENCE_S)
    yield "late"


def test_a_client_that_leaves_stops_the_llm(guard: Open) -> None:
    models = FakeModels(endless)
    sender = ask(guard(models))
    wait_until(lambda: bool(sender.sent), "the first text")
    assert sender.text, sender.sent
    sender.is_gone = True
    assert models.cancelled.wait(PATIENCE_S), "the LLM goes on"
    assert all(one.error is None for one in sender.wait().sent)


def test_a_stream_that_fails_on_its_way_out_hides_no_cancellation(serving: Any) -> None:
    async def stream(call: Any) -> AsyncGenerator[Any, None]:
        try:
            await asyncio.sleep(PATIENCE_S)
            yield
        finally:
            raise RuntimeError("something else")

    async def run() -> None:
        models = SimpleNamespace(
            settings=SimpleNamespace(llm="llm", llm_timeout_s=PATIENCE_S), calls=SimpleNamespace(stream=stream)
        )
        parts = serving.GuardedParts(models, serving.read_request(request_of(), 100), print)
        task = asyncio.ensure_future(anext(parts.pieces()))
        for _ in range(5):  # until it waits
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(run())


def test_unsafe_text_stops_the_llm(guard: Open) -> None:
    def llm(models: FakeModels, context: Any) -> Iterator[str]:
        yield "BAD"
        yield from endless(models, context)

    models = FakeModels(llm)
    sender = ask(guard(models)).wait()
    assert models.cancelled.wait(PATIENCE_S), "the LLM goes on"
    assert (sender.text, bytes(sender.sent[-1].outputs["block_reason"][0])) == ("", b"answer")


def test_a_silent_llm_is_given_up(guard: Open) -> None:
    models = FakeModels(silent)
    sender = ask(guard(models, llm_timeout_ms="100")).wait()
    assert sender.error.text == "llm was silent for longer than llm_timeout_ms=100 [UNAVAILABLE]"
    assert sender.error.number == TritonError.UNAVAILABLE and models.cancelled.wait(PATIENCE_S)


def test_an_error_waits_for_no_stream_that_stays_open(guard: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled in that moment the LLM's model could never be unloaded: whoever leaves, the stream gets its time."""
    drain_s = "slipstream.encoders.triton_calls._DRAIN_S"

    def llm(models: FakeModels, context: Any) -> Iterator[str]:
        yield ERROR + "the engine failed"
        yield from silent(models, context)

    models = FakeModels(llm)
    model = guard(models)
    monkeypatch.setattr(drain_s, PATIENCE_S)
    assert ask(model).wait().error.text == "the engine failed [INTERNAL]"
    assert on_loop(model, lambda: len(model._guard._models.calls._draining)) == 1
    assert not models.cancelled.is_set(), "cancelled in the moment of its error"
    models.may_go.set()
    assert models.cancelled.wait(PATIENCE_S)
    wait_until(lambda: not model._guard._models.calls._draining, "the stream to be read to its end")
    models.may_go.clear()
    models.cancelled.clear()
    monkeypatch.setattr(drain_s, 0.05)
    ask(model).wait()
    assert models.cancelled.wait(PATIENCE_S), "a stream that never ends stays open"


def test_an_encoder_that_hangs_is_given_up(guard: Open) -> None:
    models = FakeModels(lambda models, context: iter(["fine"]))
    model = guard(models, encoder_timeout_ms="150")
    models.may_check.clear()
    for _ in range(2):
        last = ask(model).wait().sent[-1].outputs
        assert (bytes(last["block_reason"][0]), bool(last["safety_checked"][0])) == (b"encoder_failure", False)
    assert len(models.checked) == 1, "the second did not wait"
    models.may_check.set()
    wait_until(lambda: ask(model).wait().text == "fine", "the encoder to be back")


def test_what_still_runs_when_the_model_is_unloaded_is_answered(guard: Open) -> None:
    models = FakeModels(endless)
    model = guard(models)
    sender = ask(model)
    while not sender.sent:
        time.sleep(0.01)
    model.finalize()
    assert sender.wait().error.number == TritonError.UNAVAILABLE and models.cancelled.wait(PATIENCE_S)
    assert "guarded" not in {thread.name for thread in threading.enumerate()}


def on_loop(model: Any, step: Callable[[], Any]) -> Any:
    """step() as one callback of the model's event loop: nothing of that loop runs meanwhile."""
    done: Future[Any] = Future()
    model._loop.call_soon_threadsafe(lambda: done.set_result(step()))
    return done.result(PATIENCE_S)


@pytest.mark.parametrize("is_unloaded", [False, True])
def test_a_request_cancelled_before_its_first_step_ends(guard: Open, serving: Any, is_unloaded: bool) -> None:
    model = guard(FakeModels(endless))
    request = request_of()

    def start_and_cancel() -> None:
        model._guard.start(serving.read_request(request, 100), request.sender)
        [(task, client)] = model._guard._clients.items()
        client.has_left = not is_unloaded
        task.cancel()

    on_loop(model, start_and_cancel)
    sender = request.sender.wait()
    assert (sender.num_ends, len(sender.sent)) == (1, int(is_unloaded)) and not model._guard._clients
    assert not is_unloaded or sender.error.number == TritonError.UNAVAILABLE


def test_a_client_that_cannot_be_asked_harms_no_other(guard: Open, caplog: pytest.LogCaptureFixture) -> None:
    models = FakeModels(endless)
    model = guard(models)
    silent_client, other = ask(model), ask(model)
    silent_client.is_gone = RuntimeError("no answer")
    wait_until(lambda: "whether a client left cannot be told" in caplog.text, "the failure to be logged")
    other.is_gone = True
    other.wait()
    silent_client.is_gone = True
    silent_client.wait()
    assert caplog.text.count("whether a client left cannot be told") == 1


@pytest.mark.parametrize("policy", ["open", "closed"])
def test_a_server_that_shuts_down_is_no_encoder_that_fails(guard: Open, policy: str) -> None:
    """Its models are gone already; the client may ask another server."""
    models = FakeModels(lambda models, context: iter(["fine"]))
    model = guard(models, safety="gone", on_encoder_failure=policy)
    assert not ask(model).wait().sent[-1].outputs["safety_checked"][0]
    for live, told in ((grpc.StatusCode.UNAVAILABLE, "Server exiting"), (False, "it is not live")):
        models.live = live
        error = ask(model).wait().error
        assert error.text == f"the server is shutting down: {told} [UNAVAILABLE]"
        assert error.number == TritonError.UNAVAILABLE


def test_a_server_that_is_slow_to_say_so_is_alive(guard: Open) -> None:
    models = FakeModels(lambda models, context: iter(["fine"]))
    models.live = grpc.StatusCode.DEADLINE_EXCEEDED
    sender = ask(guard(models, safety="gone", on_encoder_failure="open")).wait()
    assert sender.text == "fine" and not sender.sent[-1].outputs["safety_checked"][0]


def test_a_cancellation_counts_in_the_moment_of_an_event_too() -> None:
    """asyncio.wait_for gave the event's result there, and the request went on for ever."""

    async def run() -> None:
        for num_steps in range(8):
            event = asyncio.Event()
            waiter = asyncio.ensure_future(happens(event.wait(), 10))
            await asyncio.sleep(0)
            event.set()
            for _ in range(num_steps):
                await asyncio.sleep(0)
            was_done = waiter.done()
            waiter.cancel()
            await asyncio.wait({waiter})
            assert waiter.cancelled() != was_done

    asyncio.run(run())


# ------------------------------------------------------------ the address


def test_where_nobody_answers_the_parameter_is_named(
    guard: Open, serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the encoders' failure: neither policy has a say."""
    monkeypatch.setattr(sys.modules["slipstream.encoders.triton_calls"], "_CONNECT_S", 0.2)
    sender = ask(guard("127.0.0.1:1")).wait()
    assert sender.error.number == TritonError.UNAVAILABLE
    assert sender.error.text.startswith("triton_url: nothing answers gRPC at 127.0.0.1:1; accepted: host:port")
