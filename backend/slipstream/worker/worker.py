"""The worker: runs one model on one device by the messages of interface.py. Engine thread.

A launched step is kept until its result is read, and the last read step until the next one is read, because the engine
asks for drafts in between. Steps that were launched ahead and never matched are dropped then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from slipstream.core.config import EngineConfig
from slipstream.core.errors import drop_locals
from slipstream.core.start_up import StartUp
from slipstream.nn.decoder import Decoder
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.block_tables import BlockTables
from slipstream.worker.hardware import Hardware
from slipstream.worker.interface import (
    AheadInput,
    DraftInput,
    DraftResult,
    NewRequest,
    StepInput,
    StepResult,
    Updates,
    WorkerInfo,
)
from slipstream.worker.launched_step import LaunchedSample, RunningStep
from slipstream.worker.load_target import enter_device, finish_phase, in_inference_mode, load_target
from slipstream.worker.memory_plan import MemoryPlan
from slipstream.worker.model_runner import ModelRunner
from slipstream.worker.request_state import RequestStates
from slipstream.worker.residency import HostWeights, freeze, give_memory_back
from slipstream.worker.sample.sampler import PendingTokens
from slipstream.worker.sample.structured_output import GrammarMasks
from slipstream.worker.spec_decode.interface import SpeculatorContext
from slipstream.worker.spec_decode.speculator import HeadOutputs, Speculator, measured_costs


@dataclass
class _Staged:
    """A step in the stages of a model, which is sampled when its result is asked for."""

    running: RunningStep
    masks: GrammarMasks | None = None


@dataclass(slots=True)
class _Launched:
    running: RunningStep
    sample: LaunchedSample
    heads: HeadOutputs


class ModelWorker:
    """Fully loaded once constructed: weights, drafters, KV pool, graphs. See interface.Worker."""

    def __init__(
        self, config: EngineConfig, spec: DecoderSpec, hardware: Hardware, plan: MemoryPlan, phases: StartUp
    ) -> None:
        self._config, self._spec, self._hardware, self._plan = config, spec, hardware, plan
        self._own_model = config.model.model
        self._target: Decoder | None = load_target(config, spec, hardware, phases)  # None: asleep without weights
        self._host_weights: HostWeights | None = None
        self._is_asleep = self._was_frozen = False
        self._assemble(self._target, phases)

    def _assemble(self, target: Decoder, phases: StartUp) -> None:
        """Make everything around the weights: it holds their addresses, and those of the KV pool."""
        config, hardware, plan = self._config, self._hardware, self._plan
        num_rows, groups = 2 * config.scheduler.max_num_seqs, plan.groups
        self._tables = BlockTables.sized(num_rows, plan.max_model_len, plan.block_size, groups)
        context = SpeculatorContext(config, hardware, plan, target, self._tables)
        methods = () if hardware.parallel.stage else config.speculation.loaded
        self.speculator = Speculator(methods, context)
        if methods:
            finish_phase(phases, "drafters", hardware)
        told = self.speculator.layout, target.feature_layers  # by the first stage, which alone has heads
        layout, target.feature_layers = hardware.parallel.decide(told)
        self.runner = ModelRunner(config, target, hardware, plan, self._tables, phases, layout)
        draft_seconds = self.speculator.capture(self.runner.verified_rows())
        finish_phase(phases, "drafting", hardware)
        self._info = WorkerInfo(self.speculator.infos, measured_costs(self.runner.step_times, draft_seconds))
        self._states = RequestStates(groups.num_full)
        self._waiting: RunningStep | None = None  # for its masks
        self._staged: dict[int, _Staged] = {}  # by step id, in order
        self._launched: dict[int, _Launched] = {}  # by step id, in order
        self._read: PendingTokens | None = None  # of the last step that was read and had any

    @property
    def info(self) -> WorkerInfo:
        return self._info

    @in_inference_mode
    def execute(self, step: StepInput) -> None:
        for new in step.new_requests:
            self._add(new)
        self._update(step.updates)
        states = self._states.of(step.sequence_ids)
        self._states.count_drawn(step, states)
        tensors = self.runner.build(step, states, self._states.any_prompt_rows)
        if step.layered is not None:
            self.runner.layered.run(step.layered)
        hidden = self.runner.forward(tensors)
        known = self._states
        running = RunningStep(step, states, tensors, hidden, known.any_prompt_logprobs, known.all_plain)
        if self.runner.finishes_later:
            self._enter_stages(running)
        elif step.waits_for_masks:
            self._waiting = running
        else:
            self._sample(running)

    @in_inference_mode
    def sample(self, masks: GrammarMasks) -> None:
        if self._staged:
            self._staged[max(self._staged)].masks = masks
            return
        running, self._waiting = self._waiting, None
        assert running is not None, "masks for a step that does not wait for them"
        self._sample(running, masks)

    @in_inference_mode
    def execute_ahead(self, ahead: AheadInput) -> None:
        behind = self._launched[ahead.behind_id]
        assert behind.sample.rows is not None, "only a verification has another launched behind it"
        step = replace(
            behind.running.step,
            step_id=ahead.step_id,
            draft_methods=ahead.draft_methods,
            kv_update_methods=ahead.kv_update_methods,
        )
        drafts = self.speculator.rows_ahead(behind.heads, ahead.method, step.num_drafts[0])
        running, sample = self.runner.run_ahead(step, behind.running, behind.sample.rows, drafts)
        self._launch_heads(running, sample)

    def result(self, step_id: int) -> StepResult:
        if step_id in self._staged:
            self._leave_stages(self._staged.pop(step_id))
        for other in [known for known in self._launched if known < step_id]:
            del self._launched[other]
        sample = self._launched[step_id].sample
        result = sample.result(self._read)
        self._read = sample.tokens or self._read  # without any, the next step's time has this one's in it
        return result

    @in_inference_mode
    def draft(self, drafts: DraftInput) -> DraftResult:
        enter_device(self._hardware.device)
        self._update(drafts.updates)
        return self.speculator.draft(drafts, self._launched[drafts.step_id].heads, self._states)

    def forget(self, sequence_ids: Sequence[int]) -> None:
        if self._is_asleep:
            return
        self._states.forget(sequence_ids)
        self._tables.drop(sequence_ids)
        self.runner.forget(sequence_ids)
        self.speculator.forget(sequence_ids)

    @in_inference_mode
    def prepare(self) -> bool:
        enter_device(self._hardware.device)
        return self.runner.capture_next()

    def sleep(self, level: int) -> None:
        if not self._is_asleep:
            self._launched.clear()
            self._staged.clear()
            self._waiting = self._read = None
            self._is_asleep = True
            del self.runner, self.speculator
            if (pipe := self._hardware.parallel.pipe) is not None:
                pipe.drain()
        device = self._hardware.device
        if level > 1:
            self._target = self._host_weights = None
        elif self._target is not None and self._host_weights is None and device.type != "cpu":
            self._host_weights = HostWeights(self._target.tensors())
        self._was_frozen = give_memory_back(device) or self._was_frozen

    @torch.inference_mode(False)  # what it makes is as after a start
    def wake(self, model: str | None) -> None:
        phases, config, has_weights = StartUp(), self._config, self._target is not None
        if model is not None:
            self._config = replace(config, model=replace(config.model, model=model or self._own_model))
        try:
            if self._host_weights is not None:
                self._host_weights.restore()
                self._host_weights = None
            if self._target is None:
                self._target = load_target(self._config, self._spec, self._hardware, phases)
            self._assemble(self._target, phases)
        except BaseException as error:
            drop_locals(error)
            self._config = config
            self.__dict__.pop("runner", None)
            self.__dict__.pop("speculator", None)
            self.sleep(1 if has_weights else 2)
            raise
        self._is_asleep = False
        if self._was_frozen:
            freeze()

    def close(self) -> None:
        self._launched.clear()
        self._staged.clear()
        self._waiting = self._target = self._host_weights = None
        if not self._is_asleep:
            del self.runner, self.speculator

    # ---- parts

    def _add(self, new: NewRequest) -> None:
        self._states.add(new)
        self._tables.put(new.sequence_id, new.block_ids, new.window_block_ids)

    def _update(self, updates: Updates) -> None:
        self._states.update(updates)
        self._tables.extend_all(updates.block_ids)
        for sequence_id, block_ids in updates.window_block_ids.items():
            self._tables.extend_windows(sequence_id, block_ids)

    def _sample(self, running: RunningStep, masks: GrammarMasks | None = None) -> None:
        self._launch_heads(running, self.runner.sample(running, self.speculator.draft_probs, masks))

    def _enter_stages(self, running: RunningStep) -> None:
        if not self._hardware.parallel.stage:
            self._staged[running.step.step_id] = _Staged(running)

    @in_inference_mode
    def _leave_stages(self, staged: _Staged) -> None:
        enter_device(self._hardware.device)
        self._sample(self.runner.finish(staged.running), staged.masks)
        gone = [state.sequence_id for state in staged.running.states if self._states.get(state.sequence_id) is None]
        if gone:  # meanwhile: what the step has collected for them
            self.runner.forget(gone)

    def _launch_heads(self, running: RunningStep, sample: LaunchedSample) -> None:
        step, rows = running.step, lambda: self.runner.computed_rows(running, sample)
        heads = self.speculator.run_heads(step.draft_methods, step.kv_update_methods, rows)
        if step.adapters:  # they are loaded, and whoever counts them must see that nobody has them any more
            running = replace(running, step=replace(step, adapters=[]))
        self._launched[step.step_id] = _Launched(running, sample, heads)
