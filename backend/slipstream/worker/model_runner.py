"""What turns a scheduled step into tokens: ModelRunner computes, NullRunner measures everything around a model.

Engine thread. A runner owns device memory (weights, KV pool) and decides nothing about requests. The engine calls
build, forward and sample in this order; none of them waits for the device, so that the next step can be built and
launched while this one runs. Only the result of `sample` waits, for its own step.
"""

from __future__ import annotations

import logging
import os
from typing import Protocol

import torch
from slipstream_kernels import ops

from slipstream.core.config import EngineConfig
from slipstream.core.errors import EngineError
from slipstream.core.request import Request
from slipstream.core.start_up import StartUp
from slipstream.core.step import ScheduledStep
from slipstream.nn.batch import MAX_DECODE_QUERY_LEN, ForwardBatch
from slipstream.nn.decoder import Decoder
from slipstream.nn.load import load_model, refuse_without_numbers
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.compaction import Compaction
from slipstream.worker.computed_rows import ComputedRows
from slipstream.worker.cuda_graphs import (
    NO_DRAFTS,
    DraftForms,
    GraphShape,
    StepGraphs,
    graph_shapes,
    graph_sizes,
    slower_than_larger,
)
from slipstream.worker.host_copy import to_device
from slipstream.worker.input_batch import BatchBuilder, SampledTokens, StepArrays, fill_pending, padding_batch
from slipstream.worker.kv_cache import allocate_pool
from slipstream.worker.kv_offload import HostBlocks
from slipstream.worker.memory_plan import Hardware, MemoryPlan
from slipstream.worker.prompt_shapes import prompt_shapes
from slipstream.worker.sample.logprobs import PromptLogprobs
from slipstream.worker.sample.sampler import Sampler
from slipstream.worker.spec_decode.verifier import Verifier
from slipstream.worker.step_input import StepInput
from slipstream.worker.step_sample import LaunchedSample, LaunchedVerification, PendingSample, StepSample

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """See the module header."""

    def build(self, step: ScheduledStep) -> StepInput | None: ...

    def forward(self, inputs: StepInput | None) -> torch.Tensor | None: ...

    def sample(self, step: ScheduledStep, inputs: StepInput | None, hidden: torch.Tensor | None) -> PendingSample: ...

    def computed_rows(
        self, step: ScheduledStep, inputs: StepInput | None, hidden: torch.Tensor | None, sample: PendingSample
    ) -> ComputedRows: ...

    def run_on(
        self, step: ScheduledStep, inputs: StepInput | None, rows: ComputedRows, drafts: ops.DraftRows
    ) -> tuple[StepInput, PendingSample]: ...

    def forget(self, requests: list[Request]) -> None:
        """These have ended: drop what was kept for them."""
        ...


class ModelRunner:
    """Weights, KV pool, batches and sampling of one model on one device."""

    def __init__(
        self, config: EngineConfig, spec: DecoderSpec, hardware: Hardware, plan: MemoryPlan, phases: StartUp
    ) -> None:
        device = hardware.device
        if device.type == "cpu":
            _leave_a_core()
        else:
            _prefer_cublaslt()
        _enter(device)
        self._model = load_model(config.model, spec, device, hardware.dtype, hardware.kv_dtype)
        self._device = device
        self._max_num_tokens = min(config.scheduler.max_num_batched_tokens, plan.max_model_len)
        self._finish(phases, "weights")
        pool = allocate_pool(spec, hardware, plan, [layer.attention.kv_scales for layer in self._model.layers])
        self._pool, self._kv_caches = pool, pool.layers
        self._host_blocks = HostBlocks(pool, plan.num_host_blocks) if plan.num_host_blocks else None
        self._builder = BatchBuilder(plan.block_size, plan.max_model_len, config.scheduler.max_num_seqs, device)
        self._sampler = Sampler(spec.vocab_size, plan.max_model_len, device)
        self._sampled: SampledTokens | None = None  # of the last step
        self._prompt_logprobs = PromptLogprobs()
        self._reads_all_rows = False  # a head wants the hidden states of every token
        self.step_seconds: dict[GraphShape, float] = {}  # of decodes and verifications, where it was measured
        self._finish(phases, "KV pool")

    def start(self, config: EngineConfig, plan: MemoryPlan, phases: StartUp, drafts: DraftForms = NO_DRAFTS) -> None:
        """Warm up and capture graphs; before the first step, and after whoever wants features of the model said so."""
        device = self._device
        self._reads_all_rows = drafts.reads_all_rows
        refusal = self._model.backend.graph_refusal(plan.block_size, drafts.has_trees)
        sizes = graph_sizes(config.model.cuda_graphs, config.scheduler.max_num_seqs, device, refusal)
        shapes = graph_shapes(sizes, drafts)
        room = (self._builder.max_blocks, plan.max_model_len)
        self._graphs = StepGraphs(shapes, *room, self._run_model, device)
        prompts = [] if self._reads_all_rows else prompt_shapes(sizes, self._max_num_tokens)
        self._prompt_graphs = StepGraphs(prompts, *room, self._run_last, device)
        most = max((shape.num_tokens for shape in shapes), default=0)
        compaction = Compaction(self._pool, device)
        seats = most, max(config.scheduler.max_num_seqs, *sizes, 1)
        self._verifier = Verifier(self._model, self._sampler, compaction, config.speculation, plan, seats)
        with torch.inference_mode():
            self._warm_up(config)
            self._finish(phases, "warm-up")
            self._prompt_graphs.capture()
            self._graphs.capture(beside=self._prompt_graphs)
            self._verifier.warm_up(self.verified_rows())
        self._finish(phases, "graphs")
        if drafts.num_drafts:
            timed = [shape for shape in shapes if shape.max_query_len == 1 or shape.is_verification]
            with torch.inference_mode():
                seconds = self._graphs.time_steps(timed, plan, self._draw_greedily)
            self._graphs.drop(slower := slower_than_larger(seconds))
            self.step_seconds = {shape: took for shape, took in seconds.items() if shape not in slower}

    @property
    def model(self) -> Decoder:
        return self._model

    def verified_rows(self) -> list[ComputedRows]:
        """The static tensors of every graph of a verification, for drafting to be captured behind it."""
        return self._verifier.rows_of_graphs(self._graphs)

    @torch.inference_mode()
    def build(self, step: ScheduledStep) -> StepInput:
        _enter(self._device)
        if step.copies:
            assert self._host_blocks is not None
            self._host_blocks.run(step.copies)
        arrays = self._builder.arrays(step, self._sampled)
        inputs = self._inputs(step, arrays)
        fill_pending(inputs.batch.token_ids, arrays.pending, self._sampled)
        return inputs

    def _inputs(self, step: ScheduledStep, arrays: StepArrays) -> StepInput:
        shape = self._graphs.shape_for(arrays)
        if shape is not None:
            return StepInput(self._graphs.load(shape, arrays), shape)
        if not self._samples_last_only(step, arrays):
            return StepInput(self._builder.tensors(arrays))
        prompt_shape = self._prompt_graphs.shape_for(arrays)
        if prompt_shape is not None:
            batch = self._prompt_graphs.load(prompt_shape, arrays)
            return StepInput(batch, None, prompt_shape, is_last_only=True)
        return StepInput(self._builder.tensors(arrays), is_last_only=True)

    @torch.inference_mode()
    def forward(self, inputs: StepInput | None) -> torch.Tensor:
        """Final hidden states, [T, hidden_size] or of those that sample; the pool has all keys and values then."""
        assert inputs is not None
        if inputs.graph is not None:
            return self._graphs.replay(inputs.graph)
        if inputs.prompt_graph is not None:
            return self._prompt_graphs.replay(inputs.prompt_graph)[: len(inputs.batch.logits_indices)]
        if inputs.is_last_only:
            return self._run_last(inputs.batch)
        return self._run_model(inputs.batch)

    @torch.inference_mode()
    def sample(self, step: ScheduledStep, inputs: StepInput | None, hidden: torch.Tensor | None) -> PendingSample:
        assert inputs is not None and hidden is not None
        self._prompt_logprobs.collect(step, hidden, self._model.logits)
        if any(row.num_drafts for row in step.requests):
            previous, self._sampled = self._sampled, None  # nothing runs ahead of it in the plain way
            return self._verifier.verify(step, inputs, hidden, previous, self._prompt_logprobs)
        requests = [row.request for row in step.requests if row.samples]
        if not requests:
            self._sampled = None
            return StepSample([[] for _ in step.requests])
        positions = inputs.batch.positions
        if len(requests) == step.num_scheduled_tokens:
            hidden, positions = hidden[: len(requests)], positions[: len(requests)]
        else:
            rows = inputs.batch.logits_indices
            hidden, positions = hidden if inputs.is_last_only else hidden[rows], positions[rows]
        tokens = self._sampler.sample(
            requests, self._model.lm_head(self._model.final(hidden)), positions, self._sampled
        )
        rows_of_ids = {request.request_id: row for row, request in enumerate(requests)}
        self._sampled = SampledTokens(rows_of_ids, tokens.token_ids)
        places = iter(range(len(requests)))
        row_of = [next(places) if row.samples else -1 for row in step.requests]
        return LaunchedSample(row_of, tokens, self._prompt_logprobs.take(requests))

    @torch.inference_mode()
    def computed_rows(
        self, step: ScheduledStep, inputs: StepInput | None, hidden: torch.Tensor | None, sample: PendingSample
    ) -> ComputedRows:
        """What heads may draft from after `sample`; good until the next `build`."""
        assert inputs is not None and hidden is not None
        if isinstance(sample, LaunchedVerification):
            return sample.rows
        drawn = sample.tokens.token_ids if isinstance(sample, LaunchedSample) else None
        if inputs.is_last_only:
            return self._last_rows(step, inputs.batch, hidden, drawn)
        next_ids, last = self._verifier.next_ids(step, inputs, drawn), inputs.batch.query_start_loc[1:].long() - 1
        return ComputedRows(inputs.batch, hidden, next_ids, last, None, inputs.graph)

    @torch.inference_mode()
    def run_on(
        self, step: ScheduledStep, inputs: StepInput | None, rows: ComputedRows, drafts: ops.DraftRows
    ) -> tuple[StepInput, PendingSample]:
        """Verify what heads drafted behind `step`, before anything of it is read: its requests, with as many drafts."""
        assert inputs is not None
        inputs = self._verifier.advance(step, inputs, rows, drafts)
        hidden = self.forward(inputs)
        return inputs, self._verifier.verify(step, inputs, hidden, None, self._prompt_logprobs, knows_drafts=False)

    def forget(self, requests: list[Request]) -> None:
        for request in requests:
            self._prompt_logprobs.discard(request)

    def _last_rows(
        self, step: ScheduledStep, batch: ForwardBatch, hidden: torch.Tensor, drawn: torch.Tensor | None
    ) -> ComputedRows:
        """hidden: of the rows that sample alone. A request that does not sample stands with the first of them."""
        assert drawn is not None, "nobody drafts behind a step that samples nothing"
        places = iter(range(len(hidden)))
        last = to_device([next(places) if row.samples else 0 for row in step.requests], torch.int64, self._device)
        return ComputedRows(batch, hidden, drawn, last, None)

    def _samples_last_only(self, step: ScheduledStep, arrays: StepArrays) -> bool:
        """Whether the step has rows whose final hidden states nobody reads; not if some verify drafts beside them."""
        if self._reads_all_rows or len(arrays.logits_indices) == len(arrays.token_ids):
            return False
        return all(row.request.params.prompt_logprobs is None and not row.num_drafts for row in step.requests)

    def _run_model(self, batch: ForwardBatch) -> torch.Tensor:
        return self._model.forward(batch, self._kv_caches)

    def _run_last(self, batch: ForwardBatch) -> torch.Tensor:
        return self._model.forward_last(batch, self._kv_caches)

    def _draw_greedily(self, hidden: torch.Tensor) -> None:
        self._sampler.greedy(self._model.lm_head(self._model.final(hidden)))

    def _warm_up(self, config: EngineConfig) -> None:
        """What libraries prepare once and what is compiled is prepared now; nothing is written to the pool.

        On a GPU a prompt of the largest step, a shorter one and one of a few tokens (their attention kernels differ),
        a draw with filters, then every size of decode; on a CPU one token. Weights that are no numbers, which would
        make the end of every text without a word, are refused by the first row: it sees one slot of zeros. Dummy ones
        are not: nobody reads what they say.
        """
        looks = config.model.load_format != "dummy"
        is_gpu = self._device.type == "cuda"
        for num_tokens in (self._max_num_tokens, 2 * MAX_DECODE_QUERY_LEN, 32) if is_gpu else (1,):
            batch = padding_batch(num_tokens, self._builder.max_blocks if is_gpu else 1, self._device)
            logits = self._model.logits(self._run_model(batch)[:1])
            if looks and not logits.isfinite().all():
                raise refuse_without_numbers(config.model, self._model.context.dtype)
        if is_gpu:
            logits.argmax(dim=-1)
            _draw_once(logits)
            self._graphs.warm_up()
            self._prompt_graphs.keep_launch_bound()

    def _finish(self, phases: StartUp, name: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        phases.finish(name)


def _draw_once(logits: torch.Tensor) -> None:
    """With every filter: what is built for the draw is built now."""
    one = torch.ones(logits.shape[0], device=logits.device)
    ops.sample(logits, one, one.int(), 0.5 * one, 0.5 * one, one.long(), one.long())


class NullRunner:
    """No weights and no computing: every sampled token is `token_id`. Log-probabilities and guides are not served."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def build(self, step: ScheduledStep) -> None:
        return None

    def forward(self, inputs: StepInput | None) -> None:
        return None

    def sample(self, step: ScheduledStep, inputs: StepInput | None, hidden: torch.Tensor | None) -> StepSample:
        token_id = self._token_id
        return StepSample([[token_id] if row.samples else [] for row in step.requests])

    def computed_rows(
        self, step: ScheduledStep, inputs: StepInput | None, hidden: torch.Tensor | None, sample: PendingSample
    ) -> ComputedRows:
        raise EngineError("a runner without a model computes no rows")

    def run_on(
        self, step: ScheduledStep, inputs: StepInput | None, rows: ComputedRows, drafts: ops.DraftRows
    ) -> tuple[StepInput, PendingSample]:
        raise EngineError("a runner without a model verifies nothing")

    def forget(self, requests: list[Request]) -> None:
        pass


def _enter(device: torch.device) -> None:
    """Kernels and events go to the thread's current device, which is the first GPU in every new thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _prefer_cublaslt() -> None:
    """The interface of cuBLAS that chooses the faster kernels for 17 to 64 rows of 16 bits (docs/measurements)."""
    torch.backends.cuda.preferred_blas_library("cublaslt")


def _leave_a_core() -> None:
    """One thread fewer than cores, for the server, the output thread and the clients of this machine.

    OpenMP's threads spin at their barriers: with as many as cores and anything else running, a step of 64 decodes of a
    14 M model took 800 ms instead of 35 ms (two cores, load 5).
    """
    num_cores = len(os.sched_getaffinity(0))
    if torch.get_num_threads() >= num_cores > 1:
        torch.set_num_threads(num_cores - 1)
    logger.info("computing with %d threads on %d cores", torch.get_num_threads(), num_cores)
