"""Two ranks, which are processes over gloo, say what one says; and a rank that is lost fails every request, at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engine_driver import GREEDY, Told, make_engine, run_all, run_steps
from patience import PATIENCE_S, wait_until
from processes import children_of, is_alive
from slipstream.core.config import EngineConfig, ModelConfig, ParallelConfig
from slipstream.core.errors import ConfigError, RankLostError
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import Guide, SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.executor import local_worker
from slipstream.engine.ranks import LeadingWorker
from slipstream.nn.load import check_model
from slipstream.nn.parallel import Parallel
from slipstream.nn.read_spec import read_spec
from slipstream.worker import process_group, symmetric_memory
from slipstream.worker.hardware import Hardware
from slipstream.worker.interface import Worker
from slipstream.worker.memory_plan import MemoryPlan
from slipstream.worker.plan_memory import plan_memory
from slipstream.worker.process_group import GroupCollectives, join
from slipstream.worker.resolve_hardware import resolve_hardware
from slipstream.worker.symmetric_memory import SymmetricSum, symmetric_sum
from slipstream.worker.workspace import INTERMEDIATE_COPIES
from speculation_config import speculation_config
from tiny_checkpoints import make_checkpoint
from tiny_heads import make_eagle, make_medusa, make_mtp
from tiny_model import make_tiny_llama, make_tiny_windowed

SEEDED = SamplingParams(max_tokens=20, temperature=0.9, seed=5, ignore_eos=True, top_k=50, top_p=0.95)
EDITED = replace(SEEDED, repetition_penalty=1.2, min_tokens=5, bad_words_ids=((4, 5), (9,)), logit_bias=((7, 2.0),))
LOGPROBS = replace(GREEDY, logprobs=3, prompt_logprobs=2)
GUIDED = SamplingParams(max_tokens=16, temperature=0.0, guide=Guide("regex", "[a-z]{12}"))
METHODS = ("ngram", "draft_model", "medusa", "mtp", "eagle")
TWO = ParallelConfig(tensor_parallel_size=2)
CPU = torch.device("cpu")


def ranks() -> list[psutil.Process]:
    """The processes of ranks beside this one."""
    return children_of(os.getpid(), "rank_main")


def make_two(model: Path, folder: Path) -> Engine:
    """With every speculation method, and so few blocks that requests are preempted and blocks go to the host."""
    speculation = speculation_config(
        ",".join(METHODS),
        throttle="off",
        ngram_min=1,
        draft_model=str(model),
        medusa_heads=str(make_medusa(model, folder / "medusa")),
        mtp_module=str(make_mtp(model, folder / "mtp")),
        eagle_head=str(make_eagle(model, folder / "eagle")),
    )
    return make_engine(
        model,
        {"max_model_len": 128},
        {"num_blocks": 40, "host_memory_bytes": 1 << 20},
        {"max_num_batched_tokens": 40, "overlap_scheduling": "on"},
        speculation,
        parallel=TWO,
    )


@pytest.fixture
def two(tiny_llama: Path, tmp_path: Path) -> Iterator[Engine]:
    engine = make_two(tiny_llama, tmp_path)
    assert len(ranks()) == 1
    yield engine
    engine.close()
    assert not ranks()


def same(found: Told, expected: Told) -> None:
    assert (found.error, found.token_ids) == (expected.error, expected.token_ids)
    for own, theirs in ((found.logprobs, expected.logprobs), (found.prompt_logprobs, expected.prompt_logprobs)):
        pairs = [(one, other) for one, other in zip(own or [], theirs or [], strict=True) if one and other]
        assert all(one.logprob == pytest.approx(other.logprob, abs=1e-4) for one, other in pairs)


def test_two_ranks_say_what_one_says(two: Engine, tiny_llama: Path, prompts: list[list[int]]) -> None:
    """Every speculation method beside other requests, chunked, preempted, from the prefix cache and from the host."""
    drafted = [replace(one, speculative_method=method) for method in METHODS for one in (GREEDY, SEEDED)]
    plain = [replace(one, num_draft_tokens=0) for one in (GREEDY, EDITED, LOGPROBS, GUIDED)]
    params = [*drafted, *plain, replace(GUIDED, speculative_method="ngram"), replace(EDITED, speculative_method="mtp")]
    texts = [prompts[4 + index % 8] for index in range(len(params))]
    assert isinstance(two.worker, LeadingWorker)
    ports = [found for process in (psutil.Process(), *ranks()) for found in process.net_connections("inet")]
    assert ports and {found.laddr.ip for found in ports} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, "nobody else's"
    alone = make_engine(tiny_llama)
    expected = run_all(alone, texts, [replace(one, speculative_method=None) for one in params])
    for part in (slice(None), slice(1, None, 4)):
        for found, wanted in zip(run_all(two, texts[part], params[part]), expected[part], strict=True):
            same(found, wanted)


def test_ranks_of_layers_with_windows(tmp_path: Path, prompts: list[list[int]]) -> None:
    """Several KV groups, in deterministic mode, whose products are others."""
    model = make_tiny_windowed(tmp_path)
    params = [replace(one, logprobs=1) for one in (GREEDY, SEEDED, GREEDY, SEEDED)]
    told = []
    for parallel in (TWO, None):
        engine = make_engine(model, {"deterministic": True}, {}, {"max_num_batched_tokens": 24}, parallel=parallel)
        assert engine.memory_plan.groups.num_windowed == 3
        told.append(run_all(engine, prompts[8:], params))
        engine.close()
    for found, wanted in zip(*told, strict=True):
        same(found, wanted)


def test_a_rank_that_fails_before_it_meets_the_others(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noticed while this rank waits for it, not when the wait times out; the same at a failure while loading."""
    begun = time.monotonic()

    def kill_and_join(*arguments: Any) -> Hardware:
        ranks()[0].suspend()
        return join(*arguments)

    with monkeypatch.context() as patch, pytest.raises(RankLostError, match="rank 1"):
        patch.setattr("slipstream.engine.ranks.join", kill_and_join)
        patch.setattr(process_group, "_CONNECT_TIMEOUT", timedelta(seconds=0.5))  # gloo tries five times
        make_engine(tiny_llama, parallel=TWO)

    def kill_and_load(*arguments: Any) -> Worker:
        ranks()[0].suspend()
        return local_worker(*arguments)

    with pytest.raises(RankLostError, match="rank 1"):
        make_engine(tiny_llama, parallel=TWO, make_worker=kill_and_load)
    assert not ranks() and time.monotonic() - begun < 100


def test_no_rank_is_left_when_the_engine_cannot_start(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails behind the load of the weights."""

    def fail(*arguments: object) -> None:
        raise RuntimeError("no planner")

    monkeypatch.setattr("slipstream.engine.engine.make_planner", fail)
    with pytest.raises(RuntimeError, match="no planner"):
        make_engine(tiny_llama, parallel=TWO)
    assert not ranks()


def test_ranks_end_with_an_engine_of_another_thread(tiny_llama: Path) -> None:
    """The kernel ends them when the engine's process is killed, whichever thread has made the engine."""
    code = f"""
import sys, threading, time
sys.path[:] = {sys.path!r}
from pathlib import Path
from engine_driver import make_engine
from slipstream.core.config import ParallelConfig
def main():
    engine = make_engine(Path({str(tiny_llama)!r}), parallel=ParallelConfig(2))
    print(engine.ranks._others[0]._process.pid, flush=True)
maker = threading.Thread(target=main)
maker.start()
maker.join()
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        rank = psutil.Process(int(engine.stdout.readline()))
        rank.suspend()  # so that it cannot see that its connection has ended
        engine.kill()
    wait_until(lambda: not is_alive(rank), "the rank to end")


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_fails_every_request(tiny_llama: Path, prompts: list[list[int]], sign: int) -> None:
    two = make_engine(tiny_llama, parallel=replace(TWO, rank_timeout_s=10 * PATIENCE_S))
    requests = [two.submit(Request(list(prompt), replace(GREEDY, max_tokens=60)))[0] for prompt in prompts[4:8]]
    told: dict[Request, Told] = {}
    run_steps(two, told, 3)
    (rank,) = ranks()
    rank.send_signal(sign)
    lost = time.monotonic()
    run_steps(two, told)
    assert time.monotonic() - lost < PATIENCE_S, "not after rank_timeout_s"
    assert isinstance(two.error, RankLostError) and "rank 1" in str(two.error)
    assert [told[one].finish_reason for one in requests] == [FinishReason.ERROR] * 4
    assert {told[one].fault for one in requests} == {RankLostError}
    with pytest.raises(RankLostError):
        two.submit(Request([5], GREEDY))
    two.close()


def test_the_end_of_an_idle_rank_is_found_at_once(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when ranks are looked at the next time: requests that came before would wait and fail."""
    monkeypatch.setattr("slipstream.engine.rank_processes._WATCH_PERIOD_S", 300.0)
    engine, told = make_engine(tiny_llama, parallel=TWO), threading.Event()
    engine.ranks.tell_losses(lambda error: told.set())
    ranks()[0].kill()
    assert told.wait(PATIENCE_S)
    engine.close()


def test_a_rank_that_is_too_slow_is_lost(tiny_llama: Path) -> None:
    """A call that nobody answers; the rank itself runs on."""
    engine = make_engine(tiny_llama, parallel=replace(TWO, rank_timeout_s=1.0))
    engine.ranks.begin("forget", [])
    wait_until(lambda: engine.ranks.lost is not None, "the slow rank to be found")
    assert "rank_timeout_s" in str(engine.ranks.lost)
    wait_until(lambda: not ranks(), "the rank to be killed")
    engine.close()


def plan(model: Path, parallel: ParallelConfig, **changes: object) -> MemoryPlan:
    config = EngineConfig(model=ModelConfig(model=str(model), device="cpu", **changes), parallel=parallel)  # type: ignore[arg-type]
    spec = read_spec(model)
    return plan_memory(spec, config, resolve_hardware(config, spec), 1 << 30)


def test_what_ranks_cannot_share_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: load_format=null"):
        plan(tiny_llama, TWO, load_format="null")
    named = "which 3 ranks do not share evenly, only a divisor of 4 does; accepted tensor_parallel_size: 1, 2$"
    with pytest.raises(ConfigError, match=named):
        plan(tiny_llama, ParallelConfig(3))


@pytest.mark.parametrize("size", [4, 3])
def test_parts_that_a_format_does_not_hold_name_the_number_of_ranks(size: int, tmp_path: Path) -> None:
    """It was the field quantization, or that of its groups, which serves on one rank."""
    model = make_tiny_llama(tmp_path / "model")
    named = rf"^tensor_parallel_size={size}: .*(multiple of 32|evenly).*; accepted tensor_parallel_size: 1, 2$"
    for quantization, group_size in (("wint4", 32), ("mxfp4", 0)):
        config = ModelConfig(model=str(model), quantization=quantization, quantization_group_size=group_size)
        with pytest.raises(ConfigError, match=named):
            plan(model, ParallelConfig(size), quantization=quantization, quantization_group_size=group_size)
        with pytest.raises(ConfigError, match=named):  # as `slipstream validate` asks
            check_model(config, read_spec(model), CPU, torch.float32, parallel=Parallel(0, size))
    with pytest.raises(ConfigError, match=r"^quantization_group_size=128: .* has 64 inputs"):  # on no number of ranks
        plan(model, ParallelConfig(4), quantization="wint4", quantization_group_size=128)


def test_ranks_end_quietly_when_the_engine_cannot_load(tiny_llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="which 3 ranks do not share evenly"):
        make_engine(tiny_llama, parallel=ParallelConfig(3))
    assert not ranks() and "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("size", "model", "reason"),
    [
        (1, "llama3-gqa-rope", "accepted with tensor_parallel_size above 1"),
        (2, "llama3-gqa-rope", "the model has no experts"),
        (2, "mixtral", "5 experts, which 2 ranks do not share evenly"),
    ],
)
def test_experts_that_ranks_cannot_share_are_refused(size: int, model: str, reason: str, tmp_path: Path) -> None:
    path = make_checkpoint(model, tmp_path).path
    with pytest.raises(ConfigError, match=f"expert_parallel=True: .*{reason}"):
        plan(path, ParallelConfig(size, expert_parallel=True))


def test_a_rank_plans_for_its_part(tiny_llama: Path) -> None:
    whole, half, quarter = (plan(tiny_llama, ParallelConfig(size)) for size in (1, 2, 4))
    assert half.block_bytes == whole.block_bytes // 2 == quarter.block_bytes, "four ranks share two heads of keys"
    assert 0.5 < half.weight_bytes / whole.weight_bytes < 0.52 and quarter.weight_bytes < half.weight_bytes


def test_a_rank_has_a_part_of_the_workspace(tmp_path: Path) -> None:
    """1/N of the intermediate features, experts' too, unless ranks split the experts: one may then have all rows."""
    model = make_checkpoint("mixtral", tmp_path, num_local_experts=4).path
    sizes = (ParallelConfig(), TWO, ParallelConfig(2, expert_parallel=True))
    whole, half, by_expert = (plan(model, size).workspace_bytes for size in sizes)
    mlp = read_spec(model).layers[0].mlp
    assert whole - half == EngineConfig().scheduler.max_num_batched_tokens * INTERMEDIATE_COPIES * mlp.width // 2 * 4
    assert by_expert == whole


def test_sums_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks in deterministic mode: fp32 loses the first 1 and keeps the last."""
    collectives = GroupCollectives(4, is_ordered=True)
    monkeypatch.setattr(collectives, "gather", lambda own: torch.tensor([[1e8], [1.0], [-1e8], [1.0]]))
    assert collectives.sum(torch.ones(1)).tolist() == [1.0]


class OwnSum:
    """Our kernel, of up to 64 bytes."""

    num_asked = 0

    def takes(self, tensor: torch.Tensor) -> bool:
        self.num_asked += 1
        return 0 < tensor.nbytes <= 64 and tensor.dtype == torch.bfloat16 and tensor.is_contiguous()

    def __call__(self, partial: torch.Tensor) -> str:
        return "own"


@pytest.mark.parametrize("has_own", [False, True])
def test_each_tensor_has_one_way_to_its_sum(has_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernel's, one of PyTorch's or NCCL's, decided once a sum; PyTorch's private operations have this form."""
    monkeypatch.setattr(SymmetricSum, "__init__", lambda self: None)
    for name in ("_one_shot", "_two_shot"):
        monkeypatch.setattr(SymmetricSum, name, lambda self, partial, name=name: name)
    symmetric, most = SymmetricSum(), symmetric_memory.TWO_SHOT_BYTES // 2
    symmetric._buffer, symmetric._one_shot_bytes = torch.empty(64, dtype=torch.bfloat16), 128
    symmetric._num_ranks, symmetric.own = 2, OwnSum() if has_own else None
    monkeypatch.setattr("torch.distributed.all_reduce", lambda partial, group: None)
    collectives = GroupCollectives(2, is_ordered=False, symmetric=symmetric)

    def ways(*partials: torch.Tensor) -> list[str]:
        found = [(collectives.sum(partial), partial) for partial in partials]
        return ["library" if total is partial else str(total) for total, partial in found]

    rows = torch.zeros(17, 8, dtype=torch.bfloat16)
    smallest = "own" if has_own else "_one_shot"
    assert ways(*(rows[:count] for count in (0, 1, 4, 5, 8, 9, 10))) == [
        "library", smallest, smallest, "_one_shot", "_one_shot", "library", "_two_shot",
    ]  # fmt: skip
    assert ways(rows[:10].float(), rows[:8].T, rows[:1, :4]) == ["library", "library", "own" if has_own else "library"]
    assert ways(*(torch.empty(size, dtype=torch.bfloat16) for size in (most, most + 16))) == ["_two_shot", "library"]
    if has_own:
        assert symmetric.own.num_asked == 12, "once a sum"
    own = "(Tensor symm_buffer, Tensor local_input, str reduce_op, str group_name) -> Tensor"
    assert own in str(torch.ops.symm_mem.one_shot_all_reduce_copy.default._schema)
    in_place = "(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)"
    assert in_place in str(torch.ops.symm_mem.two_shot_all_reduce_.default._schema)


@pytest.mark.parametrize(
    ("failures", "expected", "has_own"),
    [
        *((("", ""), True, True), (("", "make"), False, False), (("make", ""), False, False)),
        *((("", "connect"), False, False), (("compile", ""), True, False)),
    ],
)
def test_ranks_agree_on_symmetric_memory(
    failures: tuple[str, str], expected: bool, has_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails for one rank, before or while ranks connect, none takes it, and none waits for the other for ever.
    The same of our own kernel, and of ranks that one process has after others. Two ranks are two threads here."""
    here, both, said = threading.local(), threading.Barrier(2, timeout=PATIENCE_S), [True, True]
    own = [False, False]

    class Fake:
        def __init__(self, *_: object) -> None:
            if here.failure == "make":
                raise RuntimeError("no peer access")

        def connect(self) -> None:
            both.wait()
            if here.failure == "connect":
                raise RuntimeError("no peer access")

        def refusal(self) -> str | None:
            return "no compiler" if here.failure == "compile" else None

        def use_own(self) -> None:
            own[here.rank] = True

    def all_agree(value: bool) -> bool:
        said[here.rank] = value
        both.wait()
        found = all(said)
        both.wait()
        return found

    def found_by(rank: int) -> bool:
        here.rank, here.failure = rank, failures[rank]
        return symmetric_sum(rank, 2, torch.float32, torch.device("cpu"), all_agree) is not None

    monkeypatch.setattr("slipstream.worker.symmetric_memory.SymmetricSum", Fake)
    monkeypatch.setattr(symmetric_memory, "_has_met", False)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(found_by, (0, 1))) == [expected, expected]
        assert own == [has_own, has_own]
        assert symmetric_memory._has_met == (failures[0] != "make" != failures[1])
        monkeypatch.setattr(symmetric_memory, "_has_met", True)
        assert list(pool.map(found_by, (0, 1))) == [False, False]
