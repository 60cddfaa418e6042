"""The engine: requests in, tokens out, one step at a time. The order of a step is here and nowhere else.

With overlapped scheduling a step is launched before the previous one is read: the device continues from tokens that
the host learns one step later. The scheduler drops tokens of requests that have ended meanwhile. `submit`, `cancel`,
`finish` and `has_work` may be called from any thread, through one inbox; `step` and `wait` belong to the engine thread.
Knows token ids only: the output thread makes text.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from pathlib import Path

from slipstream.core.config import EngineConfig
from slipstream.core.control import RELOAD, Control
from slipstream.core.errors import CapacityError, EngineError, RequestError, SlipstreamError, internal_error
from slipstream.core.gauges import record_gauges
from slipstream.core.generation_config import with_generation_defaults
from slipstream.core.logits_processors import ServedProcessors
from slipstream.core.metric_aliases import chosen_aliases
from slipstream.core.outputs import StepOutputs
from slipstream.core.request import FinishReason, Request
from slipstream.core.request_memory import RequestMemory
from slipstream.core.scheduler import Scheduler
from slipstream.core.start_up import StartUp
from slipstream.core.stats import Metric, Stats
from slipstream.core.step import ScheduledStep
from slipstream.engine.adapters import Adapters
from slipstream.engine.beam_search import BeamSearches, first_step
from slipstream.engine.drafting import Drafting
from slipstream.engine.executor import MakeWorker, local_worker, make_kv_cache, make_prefill_budget, steps_in_flight
from slipstream.engine.grammar_host import make_grammar_host
from slipstream.engine.in_flight import AheadStep, InFlightStep, add_logprobs, end_all, failures_of, sampled_step
from slipstream.engine.inbox import MAX_MESSAGES, Add, Finish, ended_by
from slipstream.engine.input_processor import InputProcessor
from slipstream.engine.kv_events import open_kv_events
from slipstream.engine.make_planner import make_planner
from slipstream.engine.ranks import Ranks
from slipstream.engine.residency import Order, Residency, check_reload
from slipstream.engine.step_inputs import StepInputs
from slipstream.engine.structured_output import StructuredOutputs
from slipstream.engine.token_rules import TokenRules
from slipstream.nn.checkpoint_path import resolve_checkpoint, resolve_tokenizer
from slipstream.nn.read_spec import read_spec
from slipstream.nn.spec import DecoderSpec
from slipstream.tokenizer.tokenizer import TextTokenizer
from slipstream.worker.first_launch import begin_first_launch
from slipstream.worker.hardware import Hardware
from slipstream.worker.interface import AheadInput, Worker
from slipstream.worker.memory_plan import MemoryPlan
from slipstream.worker.null_worker import NullWorker
from slipstream.worker.plan_memory import plan_memory
from slipstream.worker.resolve_hardware import resolve_hardware

logger = logging.getLogger(__name__)

_GAUGE_PERIOD_S = 0.25
_NO_STEP = ScheduledStep()
_HELD_WAIT_S = 0.002  # for grammars, while nothing else is to be done


class Engine:
    """Loads a model and serves it. Raises ConfigError, before weights are read, if the configuration cannot work.

    error: why the engine is dead, or None. A dead engine has answered all requests and refuses new ones.
    """

    def __init__(
        self, config: EngineConfig, make_worker: MakeWorker = local_worker, ranks: Ranks | None = None
    ) -> None:
        """ranks: the other ones, if they have been started; this ends them if it raises."""
        self.start_up = StartUp()
        self.ranks = ranks or Ranks(config.parallel)
        try:
            self._load(config, make_worker)
            self.ranks.check()
        except BaseException as error:
            self.ranks.close(error)
            raise

    def _load(self, config: EngineConfig, make_worker: MakeWorker) -> None:
        checkpoint = resolve_checkpoint(config.model.model)
        self.config = config = with_generation_defaults(config, checkpoint)
        self.spec: DecoderSpec = read_spec(checkpoint, config.model.rope_scaling)
        tokenizer_path = resolve_tokenizer(config.model.tokenizer or str(checkpoint))
        self.tokenizer = TextTokenizer.load(tokenizer_path)
        self.start_up.finish("tokenizer")
        self._hardware = hardware = resolve_hardware(config, self.spec)
        begin_first_launch(hardware.device, self.start_up)
        processors = ServedProcessors(config.model, config.serving.max_logits_processor_bytes)
        self.adapters = Adapters(config.model, self.spec, hardware)
        self.ranks.meet(config, self.spec, hardware)
        self.start_up.finish("device and ranks")
        self._prepare(tokenizer_path, make_worker, processors)

    def _prepare(self, tokenizer_path: Path, make_worker: MakeWorker, processors: ServedProcessors) -> None:
        config, hardware = self.config, self._hardware
        self.memory_plan, self.worker = self._load_worker(make_worker)
        self.max_model_len = self.memory_plan.max_model_len
        self.start_up.log()
        planner = make_planner(config, self.spec, hardware, self.worker.info.costs)
        self.stats = Stats(chosen_aliases(config.serving), config.speculation.loaded)
        self._events = open_kv_events(config.cache, config.parallel.replica.index)
        cache = make_kv_cache(config, self.memory_plan, self._events)
        budget = make_prefill_budget(config, self.spec, hardware, self.worker.info.drafters)
        num_slots = config.model.max_loras if config.model.enable_lora else 0
        self.scheduler = Scheduler(config.scheduler, cache, self.max_model_len, self.stats, planner, budget, num_slots)
        self._num_ahead, self.scheduler.num_microbatches = steps_in_flight(config, hardware)
        self._in_flight: deque[InFlightStep] = deque()
        self._ahead: AheadStep | None = None
        self._num_steps = 0
        self.error: EngineError | None = None
        self._drafting = Drafting(config, self.worker.info.drafters, self.scheduler)
        kinds = self._drafting.needs_hashes, cache.windows is not None, hardware.parallel.num_stages > 1
        self._inputs = StepInputs(self._drafting.proposers, *kinds)
        checks = config.structured_output, self._drafting.resolve, processors.check, config.model.enable_lora
        self._input_processor = InputProcessor(self.spec, self.tokenizer, *checks)
        vocabulary = self.spec.vocab_size, self._input_processor.eos_token_ids
        host = make_grammar_host(config, tokenizer_path, *vocabulary, has_drafts=not self._drafting.is_empty)
        self._structured = StructuredOutputs(host, self.scheduler, self._fail)
        self._rules = TokenRules(self.spec.vocab_size)
        self._searches = BeamSearches(self.scheduler, self._forget)
        self.request_memory = RequestMemory(config.serving.max_total_request_bytes)
        self.residency = Residency(config, self.worker, self._forget_computed)
        self._inbox: deque[Add | Finish] = deque()
        self._num_arriving = 0  # sequences in the inbox
        self._wake = threading.Condition()
        self._gauges_due = 0.0
        self._record_gauges()

    # ---- any thread

    def submit(self, request: Request) -> list[Request]:
        """Add a request; `step` has the outputs of its n sequences. request_memory counts it until it is given back.
        Raises RequestError (it can never run here), CapacityError (too many wait), EngineError (the engine is dead)."""
        num_sequences = max(request.params.n, request.params.beam_width)
        with self._wake:  # before preparing, which takes up to 14 ms; what leaves the inbox meanwhile must count once
            if self.error is None:
                self.scheduler.check_capacity(num_sequences, self._num_arriving)
        self.adapters.resolve(request)
        sequences = self._input_processor.prepare(request)
        for sequence in sequences:
            sequence.stop_conditions = stop = self.scheduler.admission.check_fits(sequence)
        if request.params.beam_width > 1:
            sequences = [first_step(request, stop, self.spec.vocab_size)]
        self.scheduler.cache.hash_prompt(sequences)
        with self._wake:
            if self.error is not None:
                raise self.error
            self.residency.check_awake()
            self.scheduler.check_capacity(num_sequences, self._num_arriving)
            self.request_memory.take(request)
            self._num_arriving += len(sequences)
            self._post(Add(sequences))
        return sequences

    def cancel(self, handle: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End all sequences of a client request; an unknown handle is no error."""
        self._post(Finish(handle, reason))

    def finish(self, request: Request, stop: str | None = None, reason: FinishReason = FinishReason.STOP) -> None:
        """End one sequence, by default because its text has reached a stop string."""
        self._post(Finish(request, reason, stop))

    def post(self, control: Control) -> Order:
        """Have the engine thread carry out a command. Raises RequestError (weights that do not fit), CapacityError
        (another command is under way), EngineError."""
        if control.command == RELOAD:
            check_reload(self.config, self.spec, self._hardware, control.folder)
        with self._wake:
            if self.error is not None:
                raise self.error
            self._wake.notify()
            return self.residency.post(control)

    @property
    def has_work(self) -> bool:
        is_told = bool(self._inbox or self._in_flight or self.residency.order)
        return self.error is None and (is_told or self.scheduler.has_work)

    # ---- engine thread

    def wait(self, timeout: float) -> bool:
        """Sleep until there is work, at most `timeout` seconds. Returns has_work."""
        self._structured.poll(StepOutputs())  # calls for ended requests may still run
        self.stats.last_step_time = 0.0
        self.stats.publish()
        with self._wake:
            self._wake.wait_for(lambda: self.has_work or self.error is not None, timeout)
        return self.has_work

    def step(self) -> StepOutputs:
        """Run one engine step. Returns the outputs of the step that it read, perhaps the previous one, perhaps none.

        Never raises: a bug ends every request with an error and sets `error`.
        """
        outputs = StepOutputs()
        if self.error is not None:
            return outputs
        step = _NO_STEP
        try:
            start = time.monotonic()
            self.stats.last_step_time = self.stats.last_step_time or start  # a first step that hangs shows its age
            self.residency.wake_if_told()
            self._drain_inbox(outputs)
            self._structured.poll(outputs)
            outputs += self.scheduler.expire(start)
            for request in self.residency.ended(self.scheduler.live_requests):
                self._fail(request, CapacityError("the model was put to sleep before the request ended"), outputs)
            if self._drafting.must_read_before_next(self._in_flight):
                self._read_all(outputs)
            ahead, self._ahead = self._ahead, None
            step = self.scheduler.schedule(admits=ahead is None)
            if step.requests:
                self._in_flight.append((ahead and ahead.match(step)) or self._launch(step))
                self._ahead = self._launch_ahead(self._in_flight[-1])
            self._read_all(outputs, self._num_ahead if step.requests else max(0, len(self._in_flight) - 1))
            if not step.requests and not outputs:  # all requests may wait for grammars
                self._structured.poll(outputs, _HELD_WAIT_S)
            ended = outputs.ended()
            self._forget(ended)
            outputs = self._searches.advance(outputs, ended)
            order = self.residency.order  # what was submitted before it is in the inbox by now, and is served first
            if outputs or self._inbox or self._in_flight or self.scheduler.has_work:
                self.residency.idle_since = None  # what takes long would hold these outputs back
            else:
                self.residency.carry_out(order)
            self._measure(step, start)
        except Exception as error:  # the engine loop's one catch-all: answer everybody, then refuse
            lost = self.ranks.loss_behind_failure()
            outputs = self._die(lost or internal_error(logger, "the engine failed", error), step, outputs)
        return outputs

    def abandon(self, error: EngineError) -> None:
        """Refuse new requests; those that run are the caller's to answer. Any thread."""
        with self._wake:
            self.error = self.error or error
            self.residency.fail(error)
            self._wake.notify_all()

    def close(self) -> None:
        """Refuse new requests and free weights and KV pool; running requests get no answer."""
        self.abandon(EngineError("the engine is closed"))
        self._in_flight.clear()
        self._ahead = None
        self._structured.close()
        self.worker.close()
        self.ranks.close()
        if self._events is not None:
            self._events.close()
        self.worker = NullWorker(0)

    # ---- parts

    def _load_worker(self, make_worker: MakeWorker) -> tuple[MemoryPlan, Worker]:
        plan = plan_memory(self.spec, self.config, self._hardware, self.ranks.free_bytes)
        plan.log(logger)
        self.start_up.finish("plan")

        def make(hardware: Hardware) -> Worker:
            return make_worker(self.config, self.spec, hardware, plan, self.tokenizer, self.start_up)

        return plan, self.ranks.load(plan, make)

    def _forget_computed(self) -> None:
        """Before weights go: what they computed is of no use to those that come."""
        self._ahead = None
        self.scheduler.cache.clear()
        self.scheduler.adapters.forget()

    def _launch(self, step: ScheduledStep) -> InFlightStep:
        self._drafting.prepare(step, is_ahead=self._num_ahead > 0)
        draft_methods, kv_update_methods = self._drafting.methods_behind(step)
        waits_for_masks = self._structured.needs_masks(step)
        self._num_steps = step_id = self._num_steps + 1
        self.worker.execute(self._inputs.build(step_id, step, draft_methods, kv_update_methods, waits_for_masks))
        if not waits_for_masks:
            return InFlightStep(step_id, step, draft_methods)
        found = self._structured.masks(step)
        self.worker.sample(found.masks)
        return InFlightStep(step_id, step, draft_methods, found.failures, found.late)

    def _launch_ahead(self, in_flight: InFlightStep) -> AheadStep | None:
        """Launch the verification after the step just launched, if its requests and drafts are certain."""
        step = in_flight.step
        if not (self._num_ahead and in_flight.draft_methods) or in_flight.indices is not None:
            return None
        if self._inbox or self.scheduler.may_admit or not self.scheduler.cache.is_free_to_write(step):
            return None  # the blocks that drafts have been given must be free to write, too
        method = self._drafting.method_ahead(step, in_flight.draft_methods)
        if not method:
            return None
        draft_methods, kv_update_methods = self._drafting.methods_behind(step)
        self._num_steps = step_id = self._num_steps + 1
        self.worker.execute_ahead(AheadInput(step_id, in_flight.step_id, method, draft_methods, kv_update_methods))
        return AheadStep.of(InFlightStep(step_id, step, draft_methods))

    def _read_all(self, outputs: StepOutputs, num_kept: int = 0) -> None:
        """Read the launched steps, except the last num_kept."""
        while len(self._in_flight) > num_kept:
            self._read(self._in_flight[0], outputs)
            self._in_flight.popleft()

    def _read(self, in_flight: InFlightStep, outputs: StepOutputs) -> None:
        result = self.worker.result(in_flight.step_id)
        in_flight.step.device_s, sampled = result.device_s, sampled_step(in_flight, result)
        self._inputs.note_accepted(in_flight.step_id, in_flight.step, sampled.accepted_rows)
        if result.processors is not None:
            self.stats.observe(Metric.PROCESSOR_TIME, result.processors.seconds)
        for request, error in failures_of(in_flight, result):
            self._fail(request, error, outputs)
        if in_flight.late:
            self._structured.withdraw(in_flight.step, sampled.token_ids, in_flight.late)
        committed = self.scheduler.commit(in_flight.step, sampled.token_ids)
        outputs += committed
        for request, error in self._rules.enforce(committed):
            self._fail(request, error, outputs)
        add_logprobs(committed, sampled, result)
        self._structured.advance(committed)
        if not self._drafting.is_empty:
            self._drafting.measure(in_flight.step, sampled)
            drafts = self._drafting.input_after(in_flight, sampled.token_ids, self._inputs, self._ahead)
            if drafts is not None:
                self._drafting.assign(in_flight.step, drafts, self.worker.draft(drafts))

    def _forget(self, ended: list[Request]) -> None:
        if ended:
            sequence_ids = [request.sequence_id for request in ended]
            for knowing in (self._inputs, self.worker, self._rules):
                knowing.forget(sequence_ids)
            self._structured.forget(ended)

    def _drain_inbox(self, outputs: StepOutputs) -> None:
        finishes: list[Finish] = []
        for _ in range(MAX_MESSAGES):
            if not self._inbox or self.residency.is_waking:
                break
            with self._wake:
                message = self._inbox.popleft()
                if isinstance(message, Add):
                    self._num_arriving -= len(message.requests)
                    self._admit(message.requests, outputs)
                else:
                    finishes.append(message)
        for request, finish in ended_by(finishes, self.scheduler.live_requests):
            output = self.scheduler.finish(request, finish.reason, finish.stop_reason)
            outputs += [output] if output is not None else []

    def _admit(self, requests: list[Request], outputs: StepOutputs) -> None:
        try:
            self.residency.check_taken()
            self.scheduler.add_all(requests)
            self._structured.start(requests)
            self._rules.start(requests)
        except (RequestError, CapacityError) as error:  # checked by submit; may be outdated
            for request in requests:
                self._fail(request, error, outputs)

    def _fail(self, request: Request, error: SlipstreamError, outputs: StepOutputs) -> None:
        """End one request with an error of its own."""
        output = self.scheduler.finish(request, FinishReason.ERROR, error=str(error))
        if output is not None:
            output.fault = type(error)
            outputs.append(output)

    def _measure(self, step: ScheduledStep, start: float) -> None:
        now, has_work = time.monotonic(), self.has_work
        if step.requests:
            self.stats.observe(Metric.STEP_TIME, now - start)
        self.stats.last_step_time = now if has_work else 0.0
        if now >= self._gauges_due or not has_work:
            self._gauges_due = now + _GAUGE_PERIOD_S
            self._record_gauges()
        self.stats.publish()

    def _record_gauges(self) -> None:
        self.stats.set(Metric.NUM_STEPS, self._num_steps)
        self.stats.set(Metric.SLEEP_LEVEL, self.residency.level)
        record_gauges(self.scheduler, self.request_memory)

    def _post(self, message: Add | Finish) -> None:
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    def _die(self, error: EngineError, step: ScheduledStep, outputs: StepOutputs) -> StepOutputs:
        """The outputs, and an error for every other request; the scheduler's state is no longer trusted."""
        with self._wake:
            self.error = error
            self.residency.fail(error)
            arriving = [request for message in self._inbox if isinstance(message, Add) for request in message.requests]
            self._inbox.clear()
        # an interrupted commit may have ended requests without an output
        in_step = [request for in_flight in self._in_flight for request in in_flight.step.requests]
        self._in_flight.clear()
        self._ahead = None
        return end_all([*in_step, *step.requests, *self.scheduler.live_requests, *arriving], error, outputs)
