"""Where the time of a decode step goes: kernels by name, the GPU's idle share, the engine thread's CPU time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from measures import Record, draw_prompts, in_blocks
from slipstream.engine.engine import Engine

if TYPE_CHECKING:
    from bench_engine import EngineBench

MOST_CELLS = 6  # of a process that are profiled because they miss
STEPS_OF_A_CELL = 10
NUM_OUTPUT = 5  # tokens of output for each step that is looked at: before, in both parts, and behind


def measure_profile(bench: EngineBench, arguments: argparse.Namespace) -> Iterator[Record]:
    for batch in arguments.profile_batches:
        yield profile_of(bench, batch, arguments.contexts[0])


def profile_missed(bench: EngineBench, below: float, records: list[Record]) -> Iterator[Record]:
    """Profiles of the decodes whose ratio is below, the slowest first. Behind all that is timed: what has been profiled
    once may launch more slowly."""
    missed = [record for record in records if record["what"] == "decode" and record.get("ratio", below) < below]
    for record in sorted(missed, key=lambda record: float(record["ratio"]))[:MOST_CELLS]:
        batch, context = record["batch"], record["context"]
        num_tokens = context + NUM_OUTPUT * STEPS_OF_A_CELL
        if num_tokens > bench.max_model_len or batch * in_blocks(num_tokens) > bench.pool_tokens:
            yield {"what": "profile", "batch": batch, "context": context, "skipped": "no room for its steps"}
        else:
            yield profile_of(bench, batch, context, STEPS_OF_A_CELL)


def profile_of(bench: EngineBench, batch: int, context: int, num_steps: int = 20) -> Record:
    """launch_us: from the step's schedule until it is launched."""
    requests = bench.submit(draw_prompts(bench.shape, batch, context), NUM_OUTPUT * num_steps)
    while min(request.num_output_tokens for request in requests) < num_steps:
        bench.engine.step()
    with _launches(bench.engine) as launches:
        cpu, wall = time.thread_time(), time.perf_counter()
        for _ in range(num_steps):
            bench.engine.step()
        spent = {"step_us": time.perf_counter() - wall, "host_cpu_us": time.thread_time() - cpu}
    spent["launch_us"] = sum(launches)
    kernels = _kernels(bench, num_steps)
    while bench.engine.has_work:
        bench.engine.step()
    times = {name: round(seconds / num_steps * 1e6) for name, seconds in spent.items()}
    return {"what": "profile", "batch": batch, "context": context, **times, **kernels}


def _kernels(bench: EngineBench, num_steps: int) -> Record:
    """Nothing on a CPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            bench.engine.step()
    return _summary(profiler, num_steps)


@contextmanager
def _launches(engine: Engine) -> Iterator[list[float]]:
    """Seconds of a step from its schedule to its launch, in two parts."""
    found: list[float] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            made = call(*arguments, **options)
            found.append(time.perf_counter() - start)
            return made

        return run

    calls: list[tuple[object, str]] = [(engine.scheduler, "schedule"), (engine, "_launch")]
    for owner, name in calls:
        setattr(owner, name, timed(getattr(owner, name)))
    try:
        yield found
    finally:
        for owner, name in calls:
            delattr(owner, name)  # the class's is seen again


def _summary(profiler: Any, num_steps: int) -> Record:
    """Busy is the union of all kernels' and copies' spans; a gap is a time of no kernel."""
    events = [event for event in profiler.events() if str(event.device_type).endswith("CUDA")]
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    if not spans:
        return {"kernels": {}}
    by_name: dict[str, list[float]] = {}
    gaps, end = [], spans[0][0]
    for start, stop, name in spans:
        if start > end:
            gaps.append(start - end)
        end = max(end, stop)
        by_name.setdefault(name[:100], []).append(stop - start)
    window = end - spans[0][0]
    largest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:25]
    return {
        "idle": round(sum(gaps) / window, 4),
        "idle_in_gaps_above_4_us": round(sum(gap for gap in gaps if gap > 4) / window, 4),
        "longest_gaps_us": [round(gap, 1) for gap in sorted(gaps)[-5:]],
        "kernels_per_step": round(len(spans) / num_steps, 1),
        "us_per_step": {
            name: [round(sum(times) / num_steps, 1), round(len(times) / num_steps, 1)] for name, times in largest
        },
    }
