"""Runs the steps of one model on one device: weights, KV pool, batches, CUDA graphs, sampling.

Engine thread. A runner owns device memory and decides nothing about requests. `build`, `forward` and `sample` do not
wait for the device, so that the next step can be built and launched while this one runs. Only the result of `sample`
waits, for its own step. The caller of a step's parts holds torch.inference_mode.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import compress

import torch
from slipstream_kernels import ops

from slipstream.core.config import EngineConfig
from slipstream.core.start_up import StartUp
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.decoder import Decoder
from slipstream.nn.load import refuse_without_numbers
from slipstream.worker.adapters import AdapterRows
from slipstream.worker.block_tables import BlockTables
from slipstream.worker.branch_moves import BranchMoves
from slipstream.worker.cuda_graphs import NO_TIMES, StepGraphs, StepTimes, time_decodes
from slipstream.worker.drawn_tokens import DrawnTokens
from slipstream.worker.graph_shapes import (
    NO_DRAFTS,
    DraftLayout,
    graph_shapes,
    graph_sizes,
    layer_shapes,
    num_singles,
    prompt_shapes,
    slower_than_larger,
)
from slipstream.worker.hardware import Hardware
from slipstream.worker.host_copy import to_device
from slipstream.worker.input_batch import BatchBuilder, SampledTokens, StepArrays
from slipstream.worker.interface import StepInput
from slipstream.worker.kv_cache import Compaction, allocate_pool, compactions
from slipstream.worker.kv_offload import HostBlocks
from slipstream.worker.launched_step import ComputedRows, LaunchedSample, RunningStep, StepTensors
from slipstream.worker.layered_prefill import LayeredRows, LayerGraphs
from slipstream.worker.load_target import enter_device, finish_phase
from slipstream.worker.memory_plan import MemoryPlan
from slipstream.worker.pipeline import PipelineStage
from slipstream.worker.prompt_rows import given_rows
from slipstream.worker.rehearsal import Rehearsal
from slipstream.worker.request_state import RequestState
from slipstream.worker.sample.logprobs import NO_PROMPTS, PromptLogprobs
from slipstream.worker.sample.named_processors import processors_of
from slipstream.worker.sample.sampler import PendingTokens, RowContext, Sampler
from slipstream.worker.sample.structured_output import GrammarMasks
from slipstream.worker.spec_decode.verification import DraftedRequest, drafted_requests
from slipstream.worker.spec_decode.verifier import Verifier
from slipstream.worker.static_tensors import GraphInputs
from slipstream.worker.warm_up import warm_up_steps


class ModelRunner:
    """tables: block tables of all requests. drafts: the layout of drafts, for which graphs are captured."""

    def __init__(
        self,
        config: EngineConfig,
        model: Decoder,
        hardware: Hardware,
        plan: MemoryPlan,
        tables: BlockTables,
        phases: StartUp,
        drafts: DraftLayout = NO_DRAFTS,
    ) -> None:
        device, spec = hardware.device, model.spec
        self._model, self._hardware, self._device = model, hardware, device
        self._is_gpu = device.type == "cuda"
        self._max_num_tokens = min(config.scheduler.max_num_batched_tokens, plan.max_model_len)
        self._parallel = parallel = hardware.parallel
        self._reads_all_rows = drafts.reads_all_rows  # a head reads the hidden states of all tokens
        self._builder = BatchBuilder(plan.block_size, tables, device, drafts.num_scratch_slots)
        of_groups = self._allocate(plan, drafts)
        processors, max_num_seqs = processors_of(config, spec, hardware), config.scheduler.max_num_seqs
        self._sampler = Sampler(spec.vocab_size, max_num_seqs, plan.max_model_len, device, parallel, processors)
        self._sampled: SampledTokens | None = None  # of the last step
        self._prompt_rows: torch.Tensor | None = None  # of prompt graphs that compute all rows
        self._prompt_logprobs = PromptLogprobs()
        finish_phase(phases, "KV pool", hardware)
        capacity = self._make_graphs(config, plan, tables, drafts)
        self._verifier = Verifier(model, self._sampler, of_groups, config.speculation, plan, capacity)
        self._rehearsal = Rehearsal(model, hardware, self._kv_caches, self._stage, self._builder.max_blocks)
        self._capture(config, phases, drafts)
        self.step_times = self._time_steps(plan) if drafts.num_drafts else NO_TIMES

    def _allocate(self, plan: MemoryPlan, drafts: DraftLayout) -> list[Compaction]:
        """Make the KV pool, and blocks in host memory. Returns how the verifier compacts each KV group: not at all with
        stages, which move the rows themselves."""
        model, hardware, parallel = self._model, self._hardware, self._parallel
        scales = [layer.attention.kv_scales for layer in model.own_layers]
        groups = plan.groups.within(parallel.own_layers(model.spec.num_layers))
        pool = allocate_pool(model.spec.of_stage(parallel).of_rank(parallel), hardware, plan, scales, groups)
        model.kv_groups = groups.of_layers
        self._kv_caches = pool.layers
        self._host_blocks = HostBlocks(pool, plan.num_host_blocks) if plan.num_host_blocks else None
        of_groups = compactions(pool, groups, self._device)
        self._branches: BranchMoves | None = None
        if parallel.num_stages > 1:
            self._branches, of_groups = BranchMoves(of_groups, drafts.has_trees, self._device), []
        return of_groups

    def _make_graphs(
        self, config: EngineConfig, plan: MemoryPlan, tables: BlockTables, drafts: DraftLayout
    ) -> tuple[int, int]:
        """Make the sets of CUDA graphs, which `_capture` records. Returns the rows and requests of the largest."""
        model, parallel, device = self._model, self._parallel, self._device
        spec, max_num_seqs = model.spec, config.scheduler.max_num_seqs
        refusal = model.backend.graph_refusal(plan.block_size, drafts.has_trees)
        if parallel.num_stages > 1 and config.speculation.loaded:  # the first drafts, but all have the same graphs
            refusal = "the model has several stages, and steps may have drafts"
        sizes = graph_sizes(config.model.cuda_graphs, max_num_seqs, device, refusal, spec.has_experts)
        shapes = graph_shapes(sizes, drafts)
        most = max((shape.num_tokens for shape in shapes), default=0)
        self._drawn = drawn = DrawnTokens(max(most, max_num_seqs), device, max(max_num_seqs, *sizes, 1))
        inputs = GraphInputs(tables.max_blocks, plan.max_model_len, device, plan.groups.num_groups, drawn.token_ids)
        self._stage: PipelineStage | None = None
        if parallel.num_stages > 1:
            self._stage = PipelineStage(model, self._kv_caches, parallel, partial(StepGraphs, shapes, inputs))
            shapes, sizes = [], ()
        draw = self._draw if parallel.num_ranks == 1 else None  # how several ranks gather logits is not captured
        self._graphs = StepGraphs(shapes, inputs, self._run_model, draw)
        run = self._run_all if drafts.reads_all_rows else self._run_last
        self._prompt_graphs = StepGraphs(prompt_shapes(sizes, self._max_num_tokens), inputs, run)
        layers = layer_shapes(() if drafts.follows_prompts else sizes, spec, plan.max_model_len)
        self.layered = LayeredRows(LayerGraphs(layers, model, self._kv_caches, inputs), self._builder)
        self._adapters: AdapterRows | None = None
        if model.context.lora is not None:
            self._adapters = AdapterRows(model, self._kv_caches, max(config.scheduler.max_num_batched_tokens, most))
            if not drafts.num_drafts:
                self._adapters.graphs = StepGraphs(shapes, inputs, self._adapters.run)
        return most, max(max_num_seqs, *sizes, 1)

    @torch.inference_mode()
    def _capture(self, config: EngineConfig, phases: StartUp, drafts: DraftLayout) -> None:
        self._parallel.decide(None)  # waits until every rank has loaded: one that cannot load breaks this, and no more
        self._warm_up(config)
        self._padding_rows = self._rehearsal.drafts(drafts, self._verifier)
        finish_phase(phases, "warm-up", self._hardware)
        if self._device.type == "cuda":
            gc.collect()  # graphs of engines that are gone hold memory until then
        if self._stage is not None:
            self._stage.graphs.capture()
        any_of = self._parallel.any_of
        self._prompt_graphs.capture(when_taken=any_of)
        self._graphs.capture(beside=self._prompt_graphs, when_taken=any_of)
        self.layered.graphs.capture(beside=self._graphs)
        if self._adapters is not None and self._adapters.graphs is not None:
            self._adapters.graphs.capture(beside=self._graphs, when_taken=any_of)
        finish_phase(phases, "graphs", self._hardware)

    @torch.inference_mode()
    def _time_steps(self, plan: MemoryPlan) -> StepTimes:
        """The times of decodes and verifications in graphs, without those that a larger graph serves faster. Stages
        time none."""
        if self._stage is not None:
            return NO_TIMES
        times = self._parallel.decide(
            time_decodes(self._graphs, plan, lambda rows: self._drawn.draw(self._model.raw_logits(rows)))
        )
        self._graphs.drop(slower := slower_than_larger(times.seconds))
        return times.without(slower)

    @property
    def finishes_later(self) -> bool:
        """Whether `forward` of the first stage only launches a step, which `finish` waits for."""
        return self._stage is not None

    @property
    def model(self) -> Decoder:
        return self._model

    def verified_rows(self) -> list[ComputedRows]:
        """The static tensors of every graph of a verification, for drafting to be captured behind it; without graphs
        those of steps that compiled their kernels, for drafting to do so too."""
        return self._verifier.rows_of_graphs(self._graphs) or self._padding_rows

    def build(self, step: StepInput, states: Sequence[RequestState], any_given: bool = False) -> StepTensors:
        """any_given: some request, perhaps not of this step, has brought embeddings."""
        if self._is_gpu:
            enter_device(self._device)
        for accepted in step.accepted:
            assert self._branches is not None
            self._branches.move(accepted)
        if step.copies:
            assert self._host_blocks is not None
            self._host_blocks.run(step.copies)
        if step.adapters:
            assert self._adapters is not None
            self._adapters.load(step.adapters)
        arrays = self._builder.arrays(step, self._sampled)
        given = given_rows(step, states, self._device, self._model.context.dtype) if any_given else None
        if given is None:
            tensors = self._tensors(step, states, arrays)
        else:
            tensors = StepTensors(replace(self._builder.tensors(arrays), given=given))
        self._drawn.give(tensors, arrays.pending, self._sampled)
        if self._branches is not None:
            self._branches.note(step, tensors.batch)
        return tensors

    def _tensors(self, step: StepInput, states: Sequence[RequestState], arrays: StepArrays) -> StepTensors:
        with_adapters = None if self._adapters is None else self._adapters.tensors(step, states, arrays)
        if with_adapters is not None:
            return with_adapters
        graphs = self._graphs if self._stage is None else self._stage.graphs
        shape = graphs.captured_for(arrays)
        if shape is not None:
            is_drawn = graphs is self._graphs and arrays.is_decode and graphs.logits(shape) is not None
            if is_drawn:
                self._drawn.draws.load(states)
            return StepTensors(graphs.load(shape, arrays), shape, is_drawn=is_drawn)
        is_last_only = self._samples_last_only(step, states, arrays)
        may_have_graph = is_last_only or (self._reads_all_rows and not step.total_num_drafts)
        prompt_shape = self._prompt_graphs.captured_for(arrays) if may_have_graph else None
        if prompt_shape is None:
            return StepTensors(self._builder.tensors(arrays), is_last_only=is_last_only)
        batch = self._prompt_graphs.load(prompt_shape, arrays)
        if is_last_only:
            return StepTensors(batch, None, prompt_shape, is_last_only=True)
        # heads read a batch of the step's own tokens, whatever the graph pads it with
        return StepTensors(self._builder.tensors(arrays), None, prompt_shape, num_decodes=num_singles(arrays))

    def forward(self, tensors: StepTensors) -> torch.Tensor:
        """Run the model. Returns the last hidden states of all rows, or of the sampled ones: [rows, hidden_size]; of a
        model in stages none."""
        if self._stage is not None:
            adapters = self._adapters if tensors.has_adapters else None
            with nullcontext() if adapters is None else adapters.applied(len(tensors.batch.token_ids)):
                self._stage.launch(tensors.batch, tensors.is_last_only, tensors.graph)
            return self._stage.no_rows()
        if tensors.has_adapters:
            assert self._adapters is not None
            return self._adapters.forward(tensors)
        if tensors.graph is not None:
            return self._graphs.replay(tensors.graph)
        if tensors.prompt_graph is not None:
            rows = self._prompt_graphs.replay(tensors.prompt_graph)
            if tensors.is_last_only:
                return rows[: len(tensors.batch.logits_indices)]
            return tensors.prompt_graph.gather(rows, tensors.num_decodes, len(tensors.batch.token_ids))
        if tensors.is_last_only:
            return self._run_last(tensors.batch)
        return self._run_model(tensors.batch)

    def finish(self, running: RunningStep) -> RunningStep:
        """With the hidden states, on the first of several stages; steps finish in the order of their launch."""
        assert self._stage is not None
        return replace(running, hidden=self._stage.finish(running.tensors.batch, running.tensors.is_last_only))

    def sample(
        self, running: RunningStep, draft_probs: Mapping[int, torch.Tensor], masks: GrammarMasks | None = None
    ) -> LaunchedSample:
        """draft_probs: by request id, what its drafts were drawn from. masks: of rows with a grammar."""
        step, states = running.step, running.states
        if running.asks_prompt_logprobs:
            self._prompt_logprobs.collect(step, states, running.hidden, self._model.logits)
        if step.total_num_drafts:
            previous, self._sampled = self._sampled, None  # a verification keeps its tokens in AcceptedRows
            is_plain = running.all_plain or self._sampler.are_plain(running.states)
            drafted = [] if is_plain else drafted_requests(running, draft_probs)
            return self._verifier.verify(running, drafted, self._prompt_logprobs, previous, masks)
        sampling = states if all(step.samples) else list(compress(states, step.samples))
        if not sampling:
            self._sampled = None
            return LaunchedSample()
        tokens = self._draw_tokens(running, sampling, masks)
        self._sampled = self._builder.sampled(step, tokens.token_ids, has_stages=self._stage is not None)
        taken = self._prompt_logprobs.take(step, states) if running.asks_prompt_logprobs else NO_PROMPTS
        return LaunchedSample(tokens, taken)

    def _draw_tokens(
        self, running: RunningStep, sampling: list[RequestState], masks: GrammarMasks | None
    ) -> PendingTokens:
        """The tokens of a step without drafts. Requests that draw by themselves need nothing behind a graph that has
        drawn, and plain ones nothing but logits behind others."""
        tensors, count = running.tensors, len(sampling)
        by_themselves = running.all_plain or self._sampler.draw_by_themselves(sampling)
        drawn = self._drawn.first(count) if tensors.is_drawn else None
        if drawn is not None and by_themselves:
            return PendingTokens(drawn)
        is_whole = count == len(running.step.token_ids)
        of_graph = self._graphs.logits(tensors.graph) if is_whole and tensors.graph is not None else None
        logits = self._logits(running, is_whole, count) if of_graph is None else of_graph[:count]
        if running.all_plain or self._sampler.are_plain(sampling):
            return PendingTokens(self._drawn.draw(logits))
        positions = tensors.batch.positions
        positions = positions[:count] if is_whole else positions.index_select(0, tensors.batch.logits_indices)
        if by_themselves:
            self._drawn.draws.load(sampling)
            return PendingTokens(self._parallel.agree(self._drawn.sample(logits, positions)))
        return self._sampler.sample(sampling, logits, positions, RowContext(self._sampled, masks=masks), drawn=drawn)

    def _logits(self, running: RunningStep, is_whole: bool, count: int) -> torch.Tensor:
        """Logits of the `count` rows that sample. is_whole: these are all rows of the step."""
        hidden, tensors = running.hidden, running.tensors
        if is_whole:
            hidden = hidden[:count]
        elif not tensors.is_last_only:
            hidden = hidden.index_select(0, tensors.batch.logits_indices)
        return self._model.raw_logits(hidden)

    def computed_rows(self, running: RunningStep, sample: LaunchedSample) -> ComputedRows:
        """The input of draft heads after `sample`; valid until the next `build`."""
        if sample.rows is not None:
            return sample.rows
        tensors, drawn = running.tensors, None if sample.tokens is None else sample.tokens.token_ids
        if tensors.is_last_only:
            return self._last_rows(running, drawn)
        next_ids, last = self._verifier.next_ids(running, drawn), tensors.batch.query_start_loc[1:].long() - 1
        return ComputedRows(tensors.batch, running.hidden, next_ids, last, None, tensors.graph)

    def run_ahead(
        self, step: StepInput, behind: RunningStep, rows: ComputedRows, drafts: ops.DraftRows
    ) -> tuple[RunningStep, LaunchedSample]:
        """Verify what heads drafted behind a step, before anything of it is read: its requests, with the
        same number of drafts."""
        tensors = self._verifier.advance(len(behind.states), behind.tensors, rows, drafts)
        is_plain = behind.all_plain or self._sampler.are_plain(behind.states)
        running = RunningStep(step, behind.states, tensors, self.forward(tensors), all_plain=is_plain)
        drafted = [] if is_plain else list(map(DraftedRequest, behind.states, step.num_drafts))
        return running, self._verifier.verify(running, drafted, self._prompt_logprobs, is_ahead=True)

    def capture_next(self) -> bool:
        """Capture one graph that a step would have to capture first. Returns whether there may be more."""
        of_adapters = None if self._adapters is None else self._adapters.graphs
        return any(graphs.capture_next() for graphs in (self._graphs, self._prompt_graphs, of_adapters) if graphs)

    def forget(self, sequence_ids: Sequence[int]) -> None:
        self._prompt_logprobs.forget(sequence_ids)

    def _last_rows(self, running: RunningStep, drawn: torch.Tensor | None) -> ComputedRows:
        """hidden: of the sampled rows only. A request that does not sample refers to the first of them."""
        assert drawn is not None, "no head drafts behind a step that samples nothing"
        rows = iter(range(len(running.hidden)))
        numbers = [next(rows) if samples else 0 for samples in running.step.samples]
        last = to_device(numbers, torch.int64, self._device)
        return ComputedRows(running.tensors.batch, running.hidden, drawn, last, None)

    def _samples_last_only(self, step: StepInput, states: Sequence[RequestState], arrays: StepArrays) -> bool:
        """Whether only the hidden states of sampled rows are read: not with heads that read all rows, drafts to verify
        or prompt log-probabilities."""
        if self._reads_all_rows or len(arrays.logits_indices) == len(arrays.token_ids) or step.total_num_drafts:
            return False
        return all(state.params.prompt_logprobs is None for state in states)

    def _run_model(self, batch: ForwardBatch) -> torch.Tensor:
        return self._model.forward(batch, self._kv_caches)

    def _run_all(self, batch: ForwardBatch) -> torch.Tensor:
        """Into one output for all prompt graphs: each would keep memory for its own."""
        rows = self._run_model(batch)
        if self._prompt_rows is None:
            size = self._prompt_graphs.shapes[-1].num_tokens, rows.shape[1]
            self._prompt_rows = rows.new_empty(size)
        return self._prompt_rows[: len(rows)].copy_(rows)

    def _run_last(self, batch: ForwardBatch) -> torch.Tensor:
        return self._model.forward_last(batch, self._kv_caches)

    def _draw(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The logits of decodes, whose tokens lie where the next graph takes them."""
        logits = self._model.raw_logits(hidden)
        self._drawn.sample(logits, batch.positions)
        return logits

    def _warm_up(self, config: EngineConfig) -> None:
        """Compile kernels and initialise libraries. Writes nothing to the pool.

        On a GPU: steps of warm_up_steps, draws of every kind, then every decode size, each of layers that differ; and
        everywhere one token of all layers. NaN weights are refused here, by its logits; dummy weights are not checked.
        """
        with self._model.abridged():
            for num_tokens, longest in warm_up_steps(self._max_num_tokens, config.model) if self._is_gpu else ():
                self._rehearsal.step(num_tokens, longest)
        logits = self._rehearsal.step(1, 1)
        if logits is not None and config.model.load_format != "dummy" and not logits.isfinite().all():
            raise refuse_without_numbers(config.model, self._model.context.dtype)
        if self._is_gpu and self._stage is not None:
            self._stage.graphs.warm_up()
        if self._is_gpu and logits is not None:
            self._sampler.warm_up(logits, config.serving.max_logprobs)
            with self._model.abridged():
                self._graphs.warm_up()
                self.layered.graphs.warm_up()
                if self._adapters is not None and self._adapters.graphs is not None:
                    self._adapters.graphs.warm_up()
            self._prompt_graphs.keep_launch_bound(self._parallel.any_of, self._model.abridged)
