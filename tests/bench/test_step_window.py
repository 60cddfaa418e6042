"""A decode's steps are those that all of its requests are in, for vLLM by the clock of its engine's process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import bench_vllm
from step_window import StepWindow

FULL_S, OTHER_S = 0.010, 0.5  # of a step with all requests, and of others


class _Core:
    """An engine's process whose requests come one after the other, one a step, and end after so many tokens."""

    def __init__(self) -> None:
        self.steps: Iterator[SimpleNamespace] = iter(())

    def start(self, num_requests: int, num_output: int) -> None:
        self.steps = self._run(num_requests, num_output)

    def _run(self, num_requests: int, num_output: int) -> Iterator[SimpleNamespace]:
        now = 100.0
        for step in range(num_requests + num_output - 1):
            running = [n for n in range(num_requests) if n <= step < n + num_output]
            now += FULL_S if len(running) == num_requests else OTHER_S
            outputs = [
                SimpleNamespace(request_id=str(n), new_token_ids=[7], finished=step == n + num_output - 1)
                for n in running
            ]
            yield SimpleNamespace(timestamp=now, outputs=outputs)
            yield SimpleNamespace(timestamp=now + 1e-3, outputs=[])  # what else it tells

    def get_output(self) -> SimpleNamespace:
        return next(self.steps)


class _Bench(bench_vllm.VllmBench):
    def __init__(self, max_model_len: int = 1000) -> None:
        self.max_model_len = max_model_len
        self.core = _Core()
        self._llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=self.core))
        self.lengths: list[int] = []

    def timed(self, prompts: list[list[int]], num_output: int) -> float:
        self.lengths.append(num_output)
        self.core.start(len(prompts), num_output)
        for _ in range(2 * (len(prompts) + num_output - 1)):
            self.core.get_output()
        return 0.0


@pytest.mark.parametrize(("num_requests", "lengths"), [(1, [24]), (5, [24]), (20, [24, 48])])
def test_steps_without_all_requests_do_not_count(num_requests: int, lengths: list[int]) -> None:
    """20 requests that come one a step are in no more than 4 of 24 steps together: these get more tokens."""
    bench = _Bench()
    assert bench.step_seconds([[1, 2]] * num_requests, 4, 24) == pytest.approx(FULL_S)
    assert bench.lengths == lengths
    assert "get_output" not in vars(bench.core)  # the class's is seen again


def test_requests_that_are_never_together_are_no_decode_of_all() -> None:
    bench = _Bench(max_model_len=12)
    with pytest.raises(AssertionError, match="0 steps with all requests"):
        bench.step_seconds([[1, 2]] * 40, 4, 24)
    assert bench.lengths == [10, 10, 10]


def test_a_window_ends_with_the_first_request() -> None:
    window = StepWindow(2)
    for now, has_ended, least in ((0.0, False, 0), (1.0, False, 2), (1.5, False, 3), (2.0, True, 4), (9.0, True, 5)):
        window.see(now, has_ended, lambda least=least: least)
    assert window.num_steps == 2 and window.seconds == 0.5
