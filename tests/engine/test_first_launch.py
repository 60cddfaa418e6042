"""Triton-lang's compiler is hashed by another thread before the first launch, where there is one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from engine_driver import make_engine
from slipstream.core.config import EngineConfig, ModelConfig
from slipstream.core.start_up import StartUp
from slipstream.worker.first_launch import begin_first_launch
from slipstream.worker.model_runner import ModelRunner
from slipstream.worker.warm_up import warm_up_steps
from slipstream_kernels.gemm.tuning import PLAIN_ROWS_OF_FP8, PLAIN_ROWS_OF_INT8
from triton.runtime.cache import triton_key


def test_a_start_on_a_gpu_hashes_the_compiler() -> None:
    triton_key.cache_clear()
    phases = StartUp()
    begin_first_launch(torch.device("cpu"), phases)
    phases.join()
    assert triton_key.cache_info().currsize == 0, "nothing is launched on a CPU"
    begin_first_launch(torch.device("cuda"), phases)
    phases.join()
    assert triton_key.cache_info().currsize == 1
    assert triton_key() and triton_key.cache_info().hits == 1, "the first launch finds it"


def test_the_warm_up_waits_for_it(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else both threads would hash."""
    told: list[str] = []
    warm_up = ModelRunner._warm_up

    def hash_slowly() -> None:
        time.sleep(0.5)
        told.append("hashed")

    def note_and_warm_up(runner: ModelRunner, config: EngineConfig) -> None:
        told.append("warm-up")
        warm_up(runner, config)

    monkeypatch.setattr(
        "slipstream.engine.engine.begin_first_launch", lambda device, phases: phases.beside(hash_slowly)
    )
    monkeypatch.setattr(ModelRunner, "_warm_up", note_and_warm_up)
    make_engine(tiny_llama).close()
    assert told == ["hashed", "warm-up"]


@pytest.mark.parametrize("most_plain", [PLAIN_ROWS_OF_FP8, PLAIN_ROWS_OF_INT8])
def test_a_start_runs_steps_whose_rows_are_quantised_and_steps_whose_are_not(most_plain: int) -> None:
    sizes = [num_tokens for num_tokens, _ in warm_up_steps(8192, ModelConfig(model="m"))]
    assert max(sizes) == 8192 and {size <= most_plain for size in sizes} == {False, True}
