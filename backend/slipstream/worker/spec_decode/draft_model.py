"""Draft model: a smaller model drafts a chain in this process, with its own KV cache over the same block tables.

It reads token ids only, so after a pause it computes the tokens that it missed. Drafts are its most probable tokens, or
drawn with the request's parameters (`draft_sampling`): under `exact` with the noise of the token's position, so that
model and draft tend to draw the same token; under `rejection` with independent noise, and the probabilities are kept.
Sources: arXiv:2211.17192, arXiv:2302.01318; common noise: arXiv:2408.07978.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from slipstream_kernels import ops

from slipstream.core.config import EngineConfig, ModelConfig
from slipstream.core.draft_methods import DRAFT_METHODS, DraftModelOptions
from slipstream.core.errors import ConfigError, naming
from slipstream.core.sampling_params import SamplingParams
from slipstream.nn.batch import MAX_DECODE_QUERY_LEN, ForwardBatch
from slipstream.nn.checkpoint_path import resolve_checkpoint
from slipstream.nn.load import check_model, load_model, planned_model, resolve_dtype
from slipstream.nn.read_spec import read_spec
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.host_copy import HostCopy, to_device
from slipstream.worker.input_batch import StepArrays, padding_batch
from slipstream.worker.kv_cache import allocate_pool
from slipstream.worker.load_target import in_inference_mode
from slipstream.worker.request_state import RequestState
from slipstream.worker.sample.draws import draws_of
from slipstream.worker.spec_decode.draft_batch import DraftBatches, Span, last_rows
from slipstream.worker.spec_decode.draft_graphs import DraftGraphs
from slipstream.worker.spec_decode.draft_kv_state import DraftKVState
from slipstream.worker.spec_decode.interface import PROPOSERS, DraftOutput, DraftRequest, SpeculatorContext
from slipstream.worker.spec_decode.planning import DraftMemory, Planning
from slipstream.worker.spec_decode.vocabulary import VocabularyMap

FIELD = "draft_model"
NUM_DRAFTS = 4
_DRAFT_SALT = 0x2545F4914F6CDD1D


@PROPOSERS.register("draft_model")
class DraftModelProposer:
    drafts_trees = False

    def __init__(self, context: SpeculatorContext) -> None:
        config, hardware, plan = context.config, context.hardware, context.plan
        self._device = hardware.device
        model = draft_config(config)
        spec = _read_draft_spec(model, plan.max_model_len)
        with naming(FIELD):
            self._model = load_model(model, spec, hardware.device, resolve_dtype(model.dtype, spec, hardware.device))
        own = replace(hardware, dtype=self._model.context.dtype, kv_dtype=self._model.context.dtype)
        self._caches = allocate_pool(spec, own, plan).layers
        sizes = context.target.spec.vocab_size, spec.vocab_size
        self._words = VocabularyMap.between(config.model, model, *sizes, hardware.device)
        self._kv_state = DraftKVState(plan.num_blocks, plan.block_size)
        self._max_tokens = config.scheduler.max_num_batched_tokens
        self._max_missed_tokens = config.scheduler.max_mixed_prefill_tokens or self._max_tokens
        self._is_sampled = config.speculation.options_of(DraftModelOptions).draft_sampling == "sampled"
        self.num_drafts = config.speculation.num_draft_tokens or NUM_DRAFTS
        self.num_scratch_slots = self.num_drafts
        self._batches = DraftBatches(context.tables, plan.block_size, plan.max_model_len, self._device, self.num_drafts)
        refusal = self._model.backend.graph_refusal(plan.block_size)
        self._warm_up_prompts()
        self._graphs = DraftGraphs(self._draft, self._batches, context, 1 + self.num_drafts, refusal=refusal)

    @staticmethod
    def refusal(params: SamplingParams) -> str | None:
        return None

    @staticmethod
    def planned(planning: Planning) -> DraftMemory:
        """The draft's KV cache has the draft's own type."""
        model, device = draft_config(planning.config), planning.target.context.computes_on
        with naming(FIELD):
            spec = read_spec(resolve_checkpoint(model.model))
            dtype = resolve_dtype(model.dtype, spec, device)
            tensors = planned_model(model, spec, dtype, device).tensors()
        return replace(planning, kv_dtype=dtype).memory_of(tensors, spec)

    @in_inference_mode
    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftOutput]:
        spans = self._catch_up(requests)
        ready = [requests[place] for place in spans]
        outputs = [DraftOutput(is_behind=place not in spans) for place in range(len(requests))]
        for place, output in zip(spans, self._drafts(ready, list(spans.values())) if ready else ()):
            outputs[place] = output
        return outputs

    def seconds(self) -> dict[int, float]:
        return self._graphs.seconds()

    def forget(self, sequence_ids: Sequence[int]) -> None:
        self._kv_state.forget(sequence_ids)

    # ---- parts

    @torch.inference_mode()
    def _warm_up_prompts(self) -> None:
        """Compile the attention of prompts of medium and of short length on a GPU."""
        for num_tokens in (2 * MAX_DECODE_QUERY_LEN, 32) if self._device.type == "cuda" else ():
            self._forward(padding_batch(num_tokens, self._batches.max_blocks, self._device))

    def _drafts(self, requests: Sequence[DraftRequest], spans: Sequence[Span]) -> list[DraftOutput]:
        """spans: of each request, all tokens that the draft has not seen."""
        arrays = self._arrays(spans)
        probs: list[torch.Tensor] = []
        if self._is_sampled and not all(one.request.params.is_greedy for one in requests):
            choose = lambda logits, level: self._choose(requests, logits, level, probs)  # noqa: E731
            tokens = self._chain(self._graphs.tensors(arrays), choose)
        else:
            tokens = self._graphs.run(arrays)
        (found,) = HostCopy((tokens,), is_urgent=True).lists()
        outputs = []
        for row, (one, chain) in enumerate(zip(requests, found)):
            count = min(one.budget.num_drafts, one.budget.depth)
            self._kv_state.feed(one.request, chain[:-1])
            drawn_from = torch.stack([q[row] for q in probs[:count]]) if probs and _rejects(one.request) else None
            outputs.append(DraftOutput(chain[:count], [], drawn_from))
        return outputs

    def _catch_up(self, requests: Sequence[DraftRequest]) -> dict[int, Span]:
        """The requests that draft now, by place, and of each the tokens that the draft has not seen: those that have
        fewest, as far as they fit into a step beside decodes.

        The next one computes as many of its tokens as fit, and drafts in a later step: all requests wait meanwhile, so
        a long prompt is spread over steps, as the model's own prompts are."""
        states = [one.request for one in requests]
        starts = [min(self._kv_state.follow(state), state.num_tokens - 1) for state in states]
        missing = [Span(state, start, state.num_tokens - start) for state, start in zip(states, starts)]
        left, ready = max(self._max_tokens, len(requests)), dict[int, Span]()
        for place in sorted(range(len(missing)), key=lambda place: missing[place].count):
            span = missing[place]
            if span.count > 1 + self.num_drafts:  # more than a verification leaves
                left = min(left, self._max_missed_tokens)
            if span.count > left:
                if left:
                    self._forward(self._graphs.tensors(self._arrays([replace(span, count=left)])))
                break
            ready[place] = span
            left -= span.count
        return ready

    def _arrays(self, spans: Sequence[Span]) -> StepArrays:
        for span in spans:
            self._kv_state.record(span.request, span.start, span.count)
        tokens = [token for span in spans for token in span.request.token_ids[span.start : span.start + span.count]]
        return self._batches.arrays(spans, tokens)

    def _draft(self, batch: ForwardBatch) -> torch.Tensor:
        """The greedy chain of each request, [num_requests, num_drafts]."""
        return self._chain(batch, lambda logits, level: ops.greedy(logits))

    def _chain(self, batch: ForwardBatch, choose: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
        """choose: logits over the target's vocabulary and the level -> a token of the target per request."""
        last = last_rows(batch)
        levels = [choose(self._logits(self._forward(batch)[last]), 0)]
        for level in range(1, self.num_drafts):
            rows = self._batches.rows_after(batch, last, levels[-1], level - 1)
            levels.append(choose(self._logits(self._forward(rows)), level))
        return torch.stack(levels, dim=1)

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        """batch: of the target's tokens."""
        batch = replace(batch, token_ids=self._words.to_draft(batch.token_ids))
        return self._model.forward(batch, self._caches)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._words.logits(self._model.logits(hidden))

    def _choose(
        self, requests: Sequence[DraftRequest], logits: torch.Tensor, level: int, probs: list[torch.Tensor]
    ) -> torch.Tensor:
        """Draw a token per request; append the distributions to `probs` if a request uses rejection."""
        states = [one.request for one in requests]
        draws, positions = draws_of(states, self._device), [state.num_tokens + level - 1 for state in states]
        salts = [_DRAFT_SALT if _rejects(state) else 0 for state in states]
        seeds = draws.seeds ^ to_device(salts, torch.int64, self._device)
        token_ids = ops.sample(logits, draws.metadata, seeds, to_device(positions, torch.int64, self._device))
        if any(map(_rejects, states)):
            temperature = draws.metadata.temperature
            assert temperature is not None
            probs.append(ops.token_probs(logits, replace(draws.metadata, temperature=temperature.clamp(min=1e-5))))
        return token_ids


def draft_config(config: EngineConfig) -> ModelConfig:
    """The draft's model settings: the served model's, but its own checkpoint and no quantisation."""
    checkpoint = config.speculation.options_of(DraftModelOptions).draft_model
    if not checkpoint:
        raise DRAFT_METHODS.get("draft_model").missing()
    return ModelConfig(
        model=checkpoint,
        dtype=config.model.dtype,
        load_format=config.model.load_format,
        device=config.model.device,
        seed=config.model.seed,
    )


def check_draft_model(config: EngineConfig, target: DecoderSpec, device: torch.device, max_model_len: int) -> None:
    """Raises ConfigError for a draft model that the proposer would refuse; reads headers and tokenizers only."""
    model = draft_config(config)
    spec = _read_draft_spec(model, max_model_len)
    with naming(FIELD):
        check_model(model, spec, device, resolve_dtype(model.dtype, spec, device))
    VocabularyMap.between(config.model, model, target.vocab_size, spec.vocab_size, torch.device("cpu"))


def _read_draft_spec(model: ModelConfig, max_model_len: int) -> DecoderSpec:
    with naming(FIELD):
        spec = read_spec(resolve_checkpoint(model.model))
    if spec.max_model_len < max_model_len:
        lengths = f"is made for {spec.max_model_len} tokens, max_model_len is {max_model_len}"
        raise ConfigError(FIELD, model.model, lengths)
    return spec


def _rejects(state: RequestState) -> bool:
    return state.acceptance == "rejection" and not state.params.is_greedy
