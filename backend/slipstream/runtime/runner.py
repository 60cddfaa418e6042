"""What turns a scheduled step into tokens: ModelRunner computes, NullRunner measures everything around a model.

Engine thread. A runner owns device memory (weights, KV pool) and decides nothing about requests. The engine calls
build, forward and sample in this order, so that a later step can be built while an earlier one runs on the device.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import Protocol

import torch

from slipstream.core.config import EngineConfig
from slipstream.core.outputs import TokenLogprobs
from slipstream.core.request import Request
from slipstream.core.step import ScheduledStep
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.load import load_model
from slipstream.nn.spec import DecoderSpec
from slipstream.runtime.batch import BatchBuilder
from slipstream.runtime.logprobs import PromptLogprobs
from slipstream.runtime.memory_plan import Hardware, MemoryPlan
from slipstream.runtime.sampler import Sampler

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepSample:
    """token_ids: aligned with step.requests, empty where nothing was sampled.

    logprobs, prompt_logprobs: by request_id, one entry per token, of those that asked; the prompt's come once, with
    the first token.
    failures: requests that went wrong by themselves, with the reason; the others of the step are sound.
    """

    token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    failures: list[tuple[Request, str]] = field(default_factory=list)


class Runner(Protocol):
    """See the module header."""

    def build(self, step: ScheduledStep) -> ForwardBatch | None: ...

    def forward(self, batch: ForwardBatch | None) -> torch.Tensor | None: ...

    def sample(self, step: ScheduledStep, batch: ForwardBatch | None, hidden: torch.Tensor | None) -> StepSample: ...

    def forget(self, requests: list[Request]) -> None:
        """These have ended: drop what was kept for them."""
        ...


class ModelRunner:
    """Weights, KV pool, batches and sampling of one model on one device."""

    def __init__(self, config: EngineConfig, spec: DecoderSpec, hardware: Hardware, plan: MemoryPlan) -> None:
        device = hardware.device
        if device.type == "cpu":
            _leave_a_core()
        self._model = load_model(config.model, spec, device, hardware.dtype)
        start = time.monotonic()
        self._kv_caches = _allocate_pool(spec, hardware, plan)
        self._builder = BatchBuilder(plan.block_size, plan.max_model_len, config.scheduler.max_num_seqs, device)
        self._sampler = Sampler(spec.vocab_size, plan.max_model_len, device)
        self._prompt_logprobs = PromptLogprobs()
        self._warm_up(device)
        logger.info("KV pool and warm-up took %.2f s", time.monotonic() - start)

    def build(self, step: ScheduledStep) -> ForwardBatch:
        return self._builder.build(step)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch | None) -> torch.Tensor:
        """[T, hidden_size]: final hidden states of the batch's tokens; their keys and values are in the pool then."""
        assert batch is not None
        return self._model.forward(batch, self._kv_caches)

    @torch.inference_mode()
    def sample(self, step: ScheduledStep, batch: ForwardBatch | None, hidden: torch.Tensor | None) -> StepSample:
        assert batch is not None and hidden is not None
        self._prompt_logprobs.collect(step, hidden, self._model.logits)
        requests = [row.request for row in step.requests if row.samples]
        if not requests:
            return StepSample([[] for _ in step.requests])
        rows = hidden if len(requests) == hidden.shape[0] else hidden[batch.logits_indices]
        sampled = self._sampler.sample(requests, self._model.logits(rows))
        drawn = iter(sampled.token_ids)
        token_ids = [[next(drawn)] if row.samples else [] for row in step.requests]
        return StepSample(token_ids, sampled.logprobs, self._prompt_logprobs.take(requests), sampled.failures)

    def forget(self, requests: list[Request]) -> None:
        for request in requests:
            self._prompt_logprobs.discard(request)

    def _warm_up(self, device: torch.device) -> None:
        """One token through the model, nothing written to the pool: what libraries prepare once is prepared now."""

        def tensor(values: list[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        batch = ForwardBatch(
            token_ids=tensor([0], torch.int64),
            positions=tensor([0], torch.int64),
            query_start_loc=tensor([0, 1], torch.int32),
            seq_lens=tensor([1], torch.int32),
            block_tables=tensor([0], torch.int32)[None],
            slot_mapping=tensor([-1], torch.int64),
            logits_indices=tensor([0], torch.int64),
            max_query_len=1,
            max_seq_len=1,
        )
        with torch.inference_mode():
            self._model.logits(self.forward(batch))
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class NullRunner:
    """No weights and no computing: every sampled token is `token_id`. Log-probabilities and guides are not served."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def build(self, step: ScheduledStep) -> None:
        return None

    def forward(self, batch: ForwardBatch | None) -> None:
        return None

    def sample(self, step: ScheduledStep, batch: ForwardBatch | None, hidden: torch.Tensor | None) -> StepSample:
        token_id = self._token_id
        return StepSample([[token_id] if row.samples else [] for row in step.requests])

    def forget(self, requests: list[Request]) -> None:
        pass


def _leave_a_core() -> None:
    """One thread fewer than cores, for the server, the output thread and the clients of this machine.

    OpenMP's threads spin at their barriers: with as many as cores and anything else running, a step of 64 decodes of a
    14 M model took 800 ms instead of 35 ms (two cores, load 5).
    """
    num_cores = len(os.sched_getaffinity(0))
    if torch.get_num_threads() >= num_cores > 1:
        torch.set_num_threads(num_cores - 1)
    logger.info("computing with %d threads on %d cores", torch.get_num_threads(), num_cores)


def _allocate_pool(spec: DecoderSpec, hardware: Hardware, plan: MemoryPlan) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values per layer: [num_blocks, num_kv_heads, block_size, head_dim]. Zeros, because attention may read
    (and mask) rows that nobody wrote, and a NaN there would survive a weight of zero."""
    shape = (plan.num_blocks, spec.num_kv_heads, plan.block_size, spec.head_dim)
    return [
        (
            torch.zeros(shape, dtype=hardware.kv_dtype, device=hardware.device),
            torch.zeros(shape, dtype=hardware.kv_dtype, device=hardware.device),
        )
        for _ in range(spec.num_layers)
    ]
