"""Makes the engine's worker, which runs in this process and is called directly, and what bounds its steps. Engine
thread.

SerializedWorker pickles every message, as for a worker in another process.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

from slipstream.core.config import EngineConfig
from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.kv_events import KVEventSink
from slipstream.core.layered_prefill import LayeredPrefill
from slipstream.core.prefill_budget import PrefillBudget
from slipstream.core.start_up import StartUp
from slipstream.nn.spec import DecoderSpec
from slipstream.tokenizer.tokenizer import TextTokenizer
from slipstream.worker.hardware import Hardware
from slipstream.worker.interface import (
    AheadInput,
    DrafterInfo,
    DraftInput,
    DraftResult,
    StepInput,
    StepResult,
    Worker,
    WorkerInfo,
)
from slipstream.worker.memory_plan import MemoryPlan
from slipstream.worker.null_worker import NullWorker
from slipstream.worker.sample.structured_output import GrammarMasks
from slipstream.worker.worker import ModelWorker

# Prefixes that a step loads from host memory at most while other requests decode, which wait: 5 to 10 ms by PCIe.
MIXED_LOAD_BYTES = 256 << 20

T = TypeVar("T")
MakeWorker = Callable[[EngineConfig, DecoderSpec, Hardware, MemoryPlan, TextTokenizer, StartUp], Worker]


def local_worker(
    config: EngineConfig,
    spec: DecoderSpec,
    hardware: Hardware,
    plan: MemoryPlan,
    tokenizer: TextTokenizer,
    phases: StartUp,
) -> Worker:
    """A worker in this process."""
    if config.model.load_format == "null":
        return NullWorker(_null_token(tokenizer))
    return ModelWorker(config, spec, hardware, plan, phases)


def steps_in_flight(config: EngineConfig, hardware: Hardware) -> tuple[int, int]:
    """(Steps that are launched before the one before them is read, steps that share the running requests).

    One is launched ahead on a GPU, none on a CPU, where a launch computes the step. With several stages there is one
    step for each, with requests of its own."""
    wanted, num_stages = config.scheduler.overlap_scheduling, hardware.parallel.num_stages
    if num_stages > 1:
        return (0, 1) if wanted == "off" else (num_stages - 1, num_stages)
    return int(hardware.device.type == "cuda" if wanted == "auto" else wanted == "on"), 1


def make_kv_cache(config: EngineConfig, plan: MemoryPlan, events: KVEventSink | None) -> KVCacheManager:
    """Prompts that must not be split do not wait for their prefixes either: what follows has to fit into one step."""
    settings, most_loads = config.cache, math.inf
    if config.scheduler.enable_chunked_prefill and plan.block_bytes:
        most_loads = max(1, MIXED_LOAD_BYTES // plan.block_bytes)
    reuses, num_host_blocks = settings.enable_prefix_caching, plan.num_host_blocks
    sizes = plan.num_blocks, settings.block_size
    return KVCacheManager(*sizes, reuses, num_host_blocks, plan.groups, events, most_loads)


def make_prefill_budget(
    config: EngineConfig, spec: DecoderSpec, hardware: Hardware, drafters: Sequence[DrafterInfo]
) -> PrefillBudget:
    """With time as a limit on GPUs. Layered prefill needs all layers in one process, and no drafter that follows the
    rows of prompts, whose final states it would have to be given."""
    follows_prompts = any(drafter.follows_prompts for drafter in drafters)
    layered = LayeredPrefill(0 if follows_prompts or hardware.parallel.num_stages > 1 else spec.num_layers)
    return PrefillBudget.of(config.scheduler, spec.attention_parity, hardware.device.type == "cuda", layered)


class SerializedWorker:
    """A worker whose messages and answers are pickled and unpickled."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    @property
    def info(self) -> WorkerInfo:
        return _copied(self.worker.info)

    def execute(self, step: StepInput) -> None:
        self.worker.execute(_copied(step))

    def sample(self, masks: GrammarMasks) -> None:
        self.worker.sample(_copied(masks))

    def execute_ahead(self, ahead: AheadInput) -> None:
        self.worker.execute_ahead(_copied(ahead))

    def result(self, step_id: int) -> StepResult:
        return _copied(self.worker.result(step_id))

    def draft(self, drafts: DraftInput) -> DraftResult:
        return _copied(self.worker.draft(_copied(drafts)))

    def forget(self, sequence_ids: Sequence[int]) -> None:
        self.worker.forget(_copied(sequence_ids))

    def prepare(self) -> bool:
        return self.worker.prepare()

    def sleep(self, level: int) -> None:
        self.worker.sleep(level)

    def wake(self, model: str | None) -> None:
        self.worker.wake(model)

    def close(self) -> None:
        self.worker.close()


def _copied(message: T) -> T:
    copy: T = pickle.loads(pickle.dumps(message))
    return copy


def _null_token(tokenizer: TextTokenizer) -> int:
    """A token with visible text for the null worker."""
    token_ids = tokenizer.encode(" a", add_special_tokens=False)
    return token_ids[-1] if token_ids else 0
