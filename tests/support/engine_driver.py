"""Engines for tests, and a loop that runs them to completion on the calling thread."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from slipstream.core.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
    StructuredOutputConfig,
)
from slipstream.core.errors import SlipstreamError
from slipstream.core.outputs import StepOutput, TokenLogprobs
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.step import ScheduledStep
from slipstream.engine.engine import Engine
from slipstream.engine.executor import MakeWorker, SerializedWorker, local_worker
from slipstream.engine.ranks import LeadingWorker
from slipstream.worker.interface import StepInput
from slipstream.worker.request_state import RequestState
from slipstream.worker.worker import ModelWorker

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
MAX_STEPS = 50_000  # one that only waits for a grammar takes 2 ms


def make_engine(
    checkpoint: Path,
    model: dict[str, object] | None = None,
    cache: dict[str, object] | None = None,
    scheduler: dict[str, object] | None = None,
    speculation: SpeculationConfig | None = None,
    structured_output: StructuredOutputConfig | None = None,
    make_worker: MakeWorker = local_worker,
    parallel: ParallelConfig | None = None,
) -> Engine:
    """A small engine on the CPU with blocks of 8 tokens, large enough for all tests by default."""
    config = EngineConfig(
        model=replace(ModelConfig(model=str(checkpoint), device="cpu"), **(model or {})),
        cache=replace(CacheConfig(block_size=8, num_blocks=512), **(cache or {})),
        scheduler=replace(SchedulerConfig(max_num_seqs=64), **(scheduler or {})),
        speculation=speculation or SpeculationConfig(),
        structured_output=structured_output or StructuredOutputConfig(),
        parallel=parallel or ParallelConfig(),
    )
    return Engine(config, make_worker)


def model_worker(engine: Engine) -> ModelWorker:
    worker = engine.worker
    worker = worker.worker if isinstance(worker, SerializedWorker | LeadingWorker) else worker
    assert isinstance(worker, ModelWorker)
    return worker


def announce(engine: Engine, step: ScheduledStep) -> tuple[StepInput, list[RequestState]]:
    """Tell the worker what a step brings, without running it."""
    worker, message = model_worker(engine), engine._inputs.build(0, step)
    for new in message.new_requests:
        worker._add(new)
    worker._update(message.updates)
    return message, worker._states.of(message.sequence_ids)


@dataclass
class Told:
    """All outputs of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""
    fault: type[SlipstreamError] | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def take(self, output: StepOutput) -> None:
        assert self.finish_reason is None, "news of a sequence after its last"
        self.token_ids += output.new_token_ids
        self.finish_reason = output.finish_reason
        self.error, self.fault = output.error, output.fault
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None
            self.prompt_logprobs = output.prompt_logprobs


def run_steps(engine: Engine, told: dict[Request, Told], num_steps: int = MAX_STEPS) -> None:
    """Step until there is no work, or num_steps times."""
    for _ in range(num_steps):
        if not engine.has_work:
            return
        for output in engine.step():
            told.setdefault(output.request, Told()).take(output)
    assert num_steps < MAX_STEPS, "the engine does not come to an end"


def run_requests(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[Request]:
    """The first sequence of each prompt, submitted at once and run to completion."""
    requests = [engine.submit(Request(list(prompt), params))[0] for prompt in prompts]
    run_steps(engine, {})
    return requests


def run_all(engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[Told]:
    """Submit all requests at once and run to completion; returns the outputs of each prompt's first sequence.

    Asserts that no block is in use afterwards.
    """
    each = params if isinstance(params, list) else [params] * len(prompts)
    requests = [Request(list(prompt), wanted, handle=i) for i, (prompt, wanted) in enumerate(zip(prompts, each))]
    for request in requests:
        engine.submit(request)
    told: dict[Request, Told] = {}
    run_steps(engine, told)
    assert engine.scheduler.cache.num_used_blocks == 0
    assert engine.error is None
    return [told[request] for request in requests]


def run_twice(
    checkpoint: Path,
    model: dict[str, object],
    cache: dict[str, object],
    parallel: ParallelConfig,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    speculation: SpeculationConfig | None = None,
) -> list[list[Told]]:
    """run_all, two times with one new engine, which is closed."""
    engine = make_engine(checkpoint, model, cache, None, speculation, parallel=parallel)
    try:
        return [run_all(engine, prompts, params) for _ in range(2)]
    finally:
        engine.close()
