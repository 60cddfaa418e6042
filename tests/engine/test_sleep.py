"""Sleep, wake and reload in place: answers as from a fresh start, memory given back, nobody else's answer lost."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_driver import GREEDY, Told, make_engine, model_worker, run_all, run_steps
from engine_peer import Backend, InThread
from frozen import frozen
from patience import wait_until
from slipstream.core.config import EngineConfig, ModelConfig, ParallelConfig, ServingConfig, SpeculationConfig
from slipstream.core.control import RELOAD, SLEEP, WAKE_UP, Control
from slipstream.core.errors import CapacityError, RequestError
from slipstream.core.request import FinishReason, Request
from slipstream.core.stats import Metric
from slipstream.engine.engine import Engine
from slipstream.engine.model_commands import ModelCommands
from slipstream.engine.residency import Order, Residency, allowed_folder
from slipstream.protocol.request_parser import ClientRequest
from slipstream.protocol.wire import ErrorCode
from slipstream.worker.null_worker import NullWorker
from slipstream.worker.residency import HostWeights
from tiny_model import make_tiny_llama

LONG = replace(GREEDY, max_tokens=200)


@pytest.fixture(scope="module")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("other_llama"), seed=1)


@pytest.fixture(scope="module")
def few(prompts: list[list[int]]) -> list[list[int]]:
    """One of them fills blocks that a later one may find."""
    return [prompts[3], prompts[7]]


def carry_out(engine: Engine, *controls: Control) -> None:
    for control in controls:
        order = engine.post(control)
        run_steps(engine, {})
        order.wait()


def texts(engine: Engine, few: list[list[int]]) -> list[list[int]]:
    return [told.token_ids for told in run_all(engine, few, GREEDY)]


def wakes_on_request(engine: Engine) -> None:
    config = engine.config
    engine.residency._config = replace(config, serving=replace(config.serving, wake_on_request=True))


@pytest.mark.parametrize("level", [1, 2])
def test_answers_are_equal_after_a_sleep(engine: Engine, few: list[list[int]], level: int) -> None:
    before = texts(engine, few)
    carry_out(engine, Control(SLEEP, level))
    assert engine.residency.level == level and not engine.has_work
    with pytest.raises(CapacityError, match="sleeps"):
        engine.submit(Request([5, 6, 7], GREEDY))
    carry_out(engine, Control(SLEEP, level), Control(WAKE_UP), Control(WAKE_UP))
    assert engine.scheduler.cache.pool.num_cached_blocks == 0
    assert texts(engine, few) == before == texts(engine, few)


def test_a_deeper_sleep_drops_the_weights(tiny_llama: Path, few: list[list[int]]) -> None:
    engine = make_engine(tiny_llama)
    before, worker = texts(engine, few), model_worker(engine)
    weights, pool = (weakref.ref(kept) for kept in (worker.runner.model.embedding, worker.runner._kv_caches[0]))
    with frozen():
        carry_out(engine, Control(SLEEP, 1))
        assert pool() is None and weights() is not None
        carry_out(engine, Control(SLEEP, 2), Control(SLEEP, 1))
        assert weights() is None and engine.residency.level == 2
        carry_out(engine, Control(WAKE_UP))
        assert gc.get_freeze_count() > 0
    assert texts(engine, few) == before


def test_a_thread_in_inference_mode_wakes_to_the_same_tensors(tiny_llama: Path, few: list[list[int]]) -> None:
    """As the server's engine thread: weights of that mode could not be written outside of it later."""
    engine = make_engine(tiny_llama)
    before = texts(engine, few)
    with torch.inference_mode():
        carry_out(engine, Control(SLEEP, 2), Control(WAKE_UP))
        assert texts(engine, few) == before
    assert not any(tensor.is_inference() for tensor in model_worker(engine).runner.model.tensors())
    assert texts(engine, few) == before


@pytest.mark.parametrize("sleeps_first", [False, True])
def test_reloaded_weights_answer_as_from_a_fresh_start(
    tiny_llama: Path, other_llama: Path, few: list[list[int]], sleeps_first: bool
) -> None:
    engine = make_engine(tiny_llama, cache={"host_memory_bytes": 1 << 20})
    own, other = texts(engine, few), texts(make_engine(other_llama), few)
    assert own != other
    if sleeps_first:
        carry_out(engine, Control(SLEEP, 1))
    carry_out(engine, Control(RELOAD, folder=str(other_llama)))
    assert texts(engine, few) == other
    carry_out(engine, Control(SLEEP, 2), Control(WAKE_UP))  # what a wake reads are the weights of the reload
    assert texts(engine, few) == other
    carry_out(engine, Control(RELOAD, folder=str(tiny_llama)))
    assert texts(engine, few) == own
    carry_out(engine, Control(RELOAD, folder=str(other_llama)), Control(RELOAD))  # without a folder: the model's own
    assert texts(engine, few) == own


def test_drafters_sleep_too(tiny_llama: Path, other_llama: Path, few: list[list[int]]) -> None:
    speculation = SpeculationConfig(methods="ngram", num_draft_tokens=3)
    engine = make_engine(tiny_llama, speculation=speculation)
    before = texts(engine, few)
    carry_out(engine, Control(SLEEP, 2), Control(WAKE_UP))
    assert texts(engine, few) == before
    carry_out(engine, Control(RELOAD, folder=str(other_llama)))
    assert texts(engine, few) == texts(make_engine(other_llama), few)


def test_ranks_sleep_and_reload_together(tiny_llama: Path, other_llama: Path, few: list[list[int]]) -> None:
    engine = make_engine(tiny_llama, parallel=ParallelConfig(tensor_parallel_size=2))
    try:
        before = texts(engine, few)
        carry_out(engine, Control(SLEEP, 1), Control(WAKE_UP))
        assert texts(engine, few) == before
        carry_out(engine, Control(RELOAD, folder=str(other_llama)))
        assert texts(engine, few) == texts(make_engine(other_llama), few)
        carry_out(engine, Control(RELOAD))
        assert texts(engine, few) == before
    finally:
        engine.close()


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_running_requests_end_as_the_command_says(engine: Engine, mode: str) -> None:
    told: dict[Request, Told] = {}
    (running,) = engine.submit(Request([5, 6, 7], LONG, handle=1))
    (another,) = engine.submit(Request([8, 9], LONG, handle=2))
    run_steps(engine, told, 5)
    order = engine.post(Control(SLEEP, 1, mode))
    with pytest.raises(CapacityError, match="told to sleep"):
        engine.submit(Request([5, 6, 7], GREEDY))
    with pytest.raises(CapacityError, match="under way"):
        engine.post(Control(WAKE_UP))
    run_steps(engine, told)
    order.wait()
    reason, fault = (FinishReason.LENGTH, None) if mode == "wait" else (FinishReason.ERROR, CapacityError)
    for request in (running, another):
        assert told[request].finish_reason is reason and (fault is None or told[request].fault is fault)
    assert engine.scheduler.cache.num_used_blocks == 0
    carry_out(engine, Control(WAKE_UP))


def test_a_request_that_comes_just_before_a_sleep_is_served(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both when the engine thread has found that there is nothing to do: the request was accepted, so it runs."""
    told: dict[Request, Told] = {}
    carry_out_next, orders = engine.residency.carry_out, []

    def carry_out_late(*order: Order | None) -> None:
        monkeypatch.undo()
        engine.submit(Request([5, 6, 7], GREEDY))
        orders.append(engine.post(Control(SLEEP)))
        carry_out_next(*order)

    monkeypatch.setattr(engine.residency, "carry_out", carry_out_late)
    assert not engine.step() and orders and not engine.residency.level
    run_steps(engine, told)
    orders[0].wait()
    assert [one.finish_reason for one in told.values()] == [FinishReason.LENGTH] and engine.residency.level == 1
    carry_out(engine, Control(WAKE_UP))


def test_a_wait_for_requests_ends(engine: Engine) -> None:
    told: dict[Request, Told] = {}
    (running,) = engine.submit(Request([5, 6, 7], LONG, handle=1))
    run_steps(engine, told, 2)
    order = engine.post(Control(SLEEP))
    order.deadline = 0.0
    run_steps(engine, told)
    order.wait()
    assert told[running].fault is CapacityError and len(told[running].token_ids) < 200
    carry_out(engine, Control(WAKE_UP))


def test_a_request_may_wake_the_model(tiny_llama: Path, few: list[list[int]]) -> None:
    engine = make_engine(tiny_llama)
    before = texts(engine, few)
    wakes_on_request(engine)
    carry_out(engine, Control(SLEEP, 2))
    assert texts(engine, few) == before and engine.residency.level == 0


def test_a_wake_that_fails_answers_who_waits_for_it(
    tiny_llama: Path, few: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_llama)
    before = texts(engine, few)
    wakes_on_request(engine)
    carry_out(engine, Control(SLEEP))
    told: dict[Request, Told] = {}

    def no_memory(target: object, phases: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(model_worker(engine), "_assemble", no_memory)
        (waiting,) = engine.submit(Request([5, 6, 7], GREEDY))
        run_steps(engine, told)
        assert told[waiting].fault is CapacityError and engine.residency.level == 1
        with pytest.raises(CapacityError, match="no memory"):
            carry_out(engine, Control(WAKE_UP))
    assert texts(engine, few) == before


def test_weights_that_do_not_fit_are_refused_and_the_model_serves_on(
    engine: Engine, tmp_path: Path, few: list[list[int]]
) -> None:
    before = texts(engine, few)
    wider = make_tiny_llama(tmp_path / "wider", hidden_size=128)
    truncated = make_tiny_llama(tmp_path / "truncated")
    (truncated / "model.safetensors").write_bytes((truncated / "model.safetensors").read_bytes()[:1000])
    for folder, told in ((wider, "other sizes"), (truncated, "model.safetensors"), (tmp_path / "none", "no such")):
        with pytest.raises(RequestError, match=told):
            engine.post(Control(RELOAD, folder=str(folder)))
    assert texts(engine, few) == before


def test_weights_without_numbers_leave_it_asleep(tiny_llama: Path, tmp_path: Path, few: list[list[int]]) -> None:
    from safetensors.torch import load_file, save_file

    engine = make_engine(tiny_llama)
    before = texts(engine, few)
    broken = make_tiny_llama(tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(Exception, match="NaN"):
        carry_out(engine, Control(RELOAD, folder=str(broken)))
    assert engine.residency.level == 2 and engine.error is None
    carry_out(engine, Control(RELOAD, folder=str(tiny_llama)))
    assert texts(engine, few) == before


def test_a_dead_engine_lets_nobody_wait(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    order = engine.post(Control(SLEEP))
    engine.close()
    with pytest.raises(Exception, match="closed"):
        order.wait()


def test_only_folders_of_the_operator_are_read(tmp_path: Path) -> None:
    own, root = tmp_path / "models/own", tmp_path / "reload"
    for folder in (own, root / "next", tmp_path / "secret"):
        folder.mkdir(parents=True)
    (root / "link").symlink_to(tmp_path / "secret")
    closed = EngineConfig(model=ModelConfig(model=str(own)))
    opened = replace(closed, serving=ServingConfig(reload_root=str(root)))
    assert allowed_folder(closed, "") == "" and allowed_folder(closed, str(own)) == ""
    assert allowed_folder(opened, "next") == allowed_folder(opened, str(root / "next")) == str(root / "next")
    refused = [
        str(tmp_path / "secret"),
        "../secret",
        "link",
        "/",
        "missing",
        "x" * 5000,
        "a\0b",
        "~root",
        "/etc/passwd",
    ]
    for config in (closed, opened):
        for folder in refused:
            with pytest.raises(RequestError, match="reload_root"):
                allowed_folder(config, folder)


def test_weights_come_back_into_every_view() -> None:
    table = torch.arange(12.0).view(3, 4)
    row, half = table[1], torch.ones(5, dtype=torch.bfloat16)
    kept = HostWeights([table, row, half, torch.empty(0)])
    assert kept.num_bytes == 12 * 4 + 5 * 2 and table.untyped_storage().nbytes() == 0
    kept.restore()
    assert table.tolist() == torch.arange(12.0).view(3, 4).tolist() and row.tolist() == [4, 5, 6, 7]
    assert half.tolist() == [1] * 5 and row.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()


def test_commands_over_the_socket(backend: Backend, demo_model: Path) -> None:
    server = InThread(backend, demo_model)
    backend.request(1, 1, control="sleep")
    [refused] = backend.responses_of(1)
    assert refused.error_code == ErrorCode.INVALID_ARG and "enable_sleep_mode" in refused.error_message
    serving = server.server._config.serving
    server.server._config = replace(server.server._config, serving=replace(serving, enable_sleep_mode=True))

    def told(handle: int, **parameters: object) -> dict[str, object]:
        backend.request(handle, 1, **parameters)
        [answer] = backend.responses_of(handle)
        assert not answer.error_message, answer.error_message
        found: dict[str, object] = json.loads(answer.outputs[0][2][4:])
        return found

    assert told(2, control="is_sleeping")["is_sleeping"] is False
    assert told(3, control="sleep", sleep_level=2, sleep_mode="abort")["sleep_level"] == 2
    assert told(4, control="is_sleeping")["is_sleeping"] is True
    backend.request(5, 3)
    [refused] = backend.responses_of(5)
    assert refused.error_code == ErrorCode.UNAVAILABLE and "sleeps" in refused.error_message
    for handle, wrong in enumerate(({"sleep_level": 3}, {"sleep_mode": "x"}, {"reload_folder": "/etc"}), 6):
        backend.request(handle, 1, control="reload_weights", **wrong)
        [refused] = backend.responses_of(handle)
        assert refused.error_code == ErrorCode.INVALID_ARG and next(iter(wrong)) in refused.error_message
    assert told(9, control="wake_up")["is_sleeping"] is False
    backend.request(10, 3)
    assert len(backend.responses_of(10)) == 3
    large = "x = 1\n" * 1600  # waits for no prompt that is tokenised
    assert told(11, control="is_sleeping", text=large, request_id="one")["is_sleeping"] is False
    wait_until(lambda: not server.server._ids, "nothing to be left to stop by its id")


def gauge(samples: Sequence[tuple[int, Sequence[float]]]) -> float:
    return next(values[-1] for index, values in samples if index == Metric.SLEEP_LEVEL)


def test_the_level_is_a_metric(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    carry_out(engine, Control(SLEEP, 2))
    engine.wait(0.0)
    assert gauge(list(engine.stats.drain())) == 2
    assert isinstance(engine.post(Control(WAKE_UP)), Order)


def test_a_command_may_end_while_a_request_is_checked() -> None:
    """The engine's thread ends it without the lock under which requests are checked."""

    class Ending(Residency):
        reads = 0

        @property
        def order(self) -> Order | None:
            self.reads += 1
            return Order(Control(SLEEP), 0.0) if self.reads == 1 else None

        @order.setter
        def order(self, order: Order | None) -> None: ...

    residency = Ending(EngineConfig(), NullWorker(0), lambda: None)
    for asked in (residency.check_awake, lambda: residency.post(Control(WAKE_UP))):
        residency.reads = 0
        with pytest.raises(CapacityError, match="sleep"):
            asked()


def test_a_command_without_a_thread_is_refused_and_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that came later were refused because it was under way."""
    answers: list[str] = []
    done = SimpleNamespace(wait=lambda: None)
    engine: Any = SimpleNamespace(post=lambda control: done, residency=SimpleNamespace(level=1))
    commands = ModelCommands(engine, EngineConfig(), lambda client, text: answers.append(text), lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        for _ in range(2):
            with pytest.raises(CapacityError, match="can't start new thread"):
                commands.start(ClientRequest(1, None), Control(SLEEP))
        commands.join(1)
    commands.start(ClientRequest(2, None), Control(SLEEP))
    commands.join(30)
    assert len(answers) == 1


def _no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")
