"""Serving one generating model: four threads between the socket and the engine.

input thread (the main one): frames -> requests -> `Engine.submit`; answers invalid requests itself. Large requests go
to the pool's thread, unless they are commands.
engine thread: `Engine.step` while there is work; passes each step's outputs on as one object.
output thread: text, answers, one frame per step; metrics a few times a second and when work ends.
Knows nothing of tensors: protocol/request_parser.py reads requests and output_processor.py writes text.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from slipstream.core.config import EngineConfig
from slipstream.core.errors import CapacityError, EngineError
from slipstream.core.outputs import RequestOutput, StepOutputs
from slipstream.core.request import FinishReason
from slipstream.core.stats import Metric
from slipstream.engine.engine import Engine
from slipstream.engine.heap import HeapTrimmer
from slipstream.engine.load_end import end_load
from slipstream.engine.logits_budget import LogitsBudget
from slipstream.engine.long_outputs import LongOutputs
from slipstream.engine.model_commands import ModelCommands
from slipstream.engine.output_processor import OutputProcessor
from slipstream.engine.prompt_tables import TableBudget
from slipstream.engine.rank_processes import RankProcesses
from slipstream.engine.ranks import Ranks
from slipstream.engine.request_ids import RequestIds
from slipstream.engine.request_pool import MAX_INLINE_BYTES, RequestPool
from slipstream.engine.request_tracing import make_request_tracer
from slipstream.engine.socket import EngineLink, error_answer, read_request, too_large
from slipstream.protocol import contract, wire
from slipstream.protocol.request_parser import ClientRequest, parse_request
from slipstream.protocol.responses import (
    encode_gathered,
    encode_response,
    is_gathered,
    response_frames,
)
from slipstream.protocol.unread_request import encode_unread, peek
from slipstream.worker.residency import freeze

logger = logging.getLogger(__name__)

_METRICS_PERIOD_S = 0.25
_IDLE_WAIT_S = 0.1  # an idle engine publishes pending metrics at this interval
_SETTLE_S = (0.02, 0.12)  # metrics are sent so long after the last answer; by the second the engine has published all
_TEXT_OUTPUT = next(i for i, output in enumerate(contract.OUTPUTS["generate"]) if output.name == "text_output")
_COMMAND_END_S = 1.0  # for the answer to a command under way, when the engine has failed
_WRITING_PAUSE_S = 0.002  # for the interpreter's other threads, between two pieces of a long output
_MAX_STEPS_AHEAD = 4  # steps that the engine may be ahead of the output thread


class GenerateServer:
    """Owns the engine and its threads. `serve` returns the exit status of the process."""

    def __init__(self, link: EngineLink, config: EngineConfig, processes: RankProcesses | None = None) -> None:
        """processes: see Ranks."""
        self._link = link
        self._tracer = make_request_tracer(config.serving)
        end = partial(end_load, link, config.serving.model_name)
        self._engine = Engine(config, ranks=Ranks(config.parallel, processes, end))
        config = self._engine.config
        self._config = replace(config, model=replace(config.model, max_model_len=self._engine.max_model_len))
        engine = self._engine
        give_memory = engine.request_memory.give
        self._outputs = OutputProcessor(engine.tokenizer, engine.finish, engine.cancel, give_memory)
        self._steps: queue.Queue[StepOutputs | None] = queue.Queue(_MAX_STEPS_AHEAD)
        self._pool = RequestPool(self, config.scheduler.max_waiting_requests, config.serving.max_tokenizing_bytes)
        self._live: dict[int, ClientRequest] = {}  # filled by the input and pool threads, emptied by the output thread
        self._ids = RequestIds()
        self._gathered: dict[int, list[RequestOutput]] = {}  # outputs of requests with unfinished sequences
        self._long = LongOutputs()
        self._commands = ModelCommands(self._engine, self._config, self._answer_once, self._refuse)
        vocab_size, max_model_len = self._engine.spec.vocab_size, self._engine.max_model_len
        self._logits = LogitsBudget(config.serving.max_logits_bytes, vocab_size, max_model_len)
        self._tables = TableBudget(config.serving.max_prompt_table_bytes)
        self._drain_deadline: float | None = None
        self._is_stopping = False
        self._exit_status = 0
        self._engine.ranks.tell_losses(self._lose)

    def ready_frame(self) -> bytes:
        metrics = [
            wire.MetricSpec(m.family, wire.MetricKind(m.kind), m.help, tuple(m.labels.items()), m.buckets)
            for m in self._engine.stats.specs
        ]
        return wire.encode_ready(contract.OUTPUTS[self._config.task], metrics)

    def serve(self) -> int:
        """Announce READY, serve until the backend closes the socket, a drain has ended or the engine has failed."""
        freeze()
        self._link.send(self.ready_frame())
        threads = [
            threading.Thread(target=self._engine_loop, name="engine", daemon=True),
            threading.Thread(target=self._output_loop, name="output", daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            for kind, payload in self._link.frames():
                self._handle(kind, payload)
        finally:
            self._is_stopping = True
            if self._exit_status:
                self._commands.join(_COMMAND_END_S)
                self._link.hang_up()
            if self._tracer is not None:
                self._tracer.close()
            self._engine.ranks.remove_folder()
        return self._exit_status

    # ------------------------------------------------------------ input thread

    def _handle(self, kind: wire.FrameType, payload: bytes) -> None:
        if kind is wire.FrameType.REQUEST:
            raw = read_request(payload, self._link.send)
            if raw is not None:
                self._admit(raw, is_large=len(payload) > MAX_INLINE_BYTES)
        elif kind is wire.FrameType.CANCEL:
            self._cancel(wire.decode_cancel(payload))
        elif kind is wire.FrameType.DRAIN:
            self._drain_deadline = time.monotonic() + wire.decode_drain(payload) / 1e3
        else:
            raise wire.ProtocolError(f"the backend sent {kind.name}")

    def _admit(self, raw: wire.Request, is_large: bool) -> None:
        try:
            if self._drain_deadline is not None:
                raise CapacityError("the model is being unloaded")
            unread = peek(raw, self._config, self._engine.tokenizer) if is_large else None
            if unread is not None:
                self._ids.add(raw.handle, unread.request_id)  # before the pool's thread can finish it
                self._pool.put(raw, self._unread_deadline(unread), unread)
            else:
                client = parse_request(raw, self._config, self._engine.tokenizer)
                self._ids.add(raw.handle, client.request_id if not client.is_stop else "")
                self._start(client)
        except Exception as error:
            self._refuse(raw.handle, error)

    def _unread_deadline(self, client: ClientRequest) -> float | None:
        """The client's deadline, or the queue's limit: waiting to be tokenised counts as waiting in the queue."""
        deadline = client.request.deadline if client.request is not None else None
        max_queue_ms = self._config.scheduler.default_max_queue_ms
        if not max_queue_ms:
            return deadline
        return min(deadline or math.inf, time.monotonic() + max_queue_ms / 1e3)

    def _start(self, client: ClientRequest) -> None:
        request = client.request
        if client.control is not None:
            self._commands.start(client, client.control)
            return
        if request is None:
            self._stop_by_id(client)
            return
        self._live[client.handle] = client  # from here on `_refuse` gives back what it has taken
        self._outputs.add(client)
        self._logits.take(request)
        self._tables.take(request)
        self._engine.submit(request)

    def _refuse(self, handle: int, error: Exception) -> None:
        if self._live.get(handle) is not None:
            self._outputs.discard(handle)
            self._forget(handle)
        else:
            self._ids.remove(handle)
        self._engine.stats.count_refusal(type(error))
        self._link.send(error_answer(handle, error))

    def _stop_by_id(self, client: ClientRequest) -> None:
        """`stop: true`: end the newest request of the same id. The stop request itself gets one response, because
        HTTP's `generate` wants exactly one: an empty text, or nothing where no text is asked for or declared."""
        earlier = self._ids.newest(client.request_id)
        if earlier is not None:
            self._cancel(earlier)
        self._answer_once(client, "")

    def _answer_once(self, client: ClientRequest, text: str) -> None:
        shape = (1, 1) if client.has_batch_dim else (1,)
        texts = [(_TEXT_OUTPUT, shape, wire.bytes_tensor([text.encode()]))] if client.outputs else []
        self._link.send(wire.encode_responses([wire.tensor_response(client.handle, wire.ResponseFlag.FINAL, texts)]))

    def _cancel(self, handle: int) -> None:
        if not self._pool.cancel(handle):
            self.cancelled(handle)

    def cancelled(self, handle: int) -> None:
        self._engine.cancel(handle)

    def _forget(self, handle: int) -> None:
        del self._live[handle]
        self._logits.give(handle)
        self._tables.give(handle)
        self._ids.remove(handle)

    # ------------------------------------------------------------ pool's thread

    def parse(self, raw: wire.Request) -> ClientRequest | Exception:
        try:
            return parse_request(raw, self._config, self._engine.tokenizer)
        except Exception as error:
            return error

    def deliver(self, handle: int, parsed: ClientRequest | Exception) -> None:
        try:
            if isinstance(parsed, Exception):
                raise parsed
            self._start(parsed)
        except Exception as error:
            self._refuse(handle, error)

    def end(self, handle: int, known: ClientRequest, reason: FinishReason) -> None:
        self._ids.remove(handle)
        for frame in response_frames(encode_unread(known, reason)):
            self._link.send(frame)

    # ------------------------------------------------------------ engine thread

    def _engine_loop(self) -> None:
        engine, steps = self._engine, self._steps
        try:
            with torch.inference_mode():  # once, where each step would enter it
                while not self._is_stopping and engine.error is None:
                    outputs = engine.step()
                    if outputs:
                        steps.put(outputs)
                    elif not engine.has_work:
                        engine.wait(_IDLE_WAIT_S)
        except Exception:
            logger.exception("the engine failed")
        finally:
            steps.put(None)

    # ------------------------------------------------------------ thread of the ranks

    def _lose(self, error: EngineError) -> None:
        """End without the engine thread, which may wait for a lost rank for ever."""
        self._engine.abandon(error)
        self._steps.put(None)

    # ------------------------------------------------------------ output thread

    def _output_loop(self) -> None:
        try:
            self._answer_steps()
        except OSError:
            pass  # the backend is gone: so are the clients
        except Exception:
            logger.exception("answering failed")
            self._fail_everything()
        self._link.stop_reading()

    def _answer_steps(self) -> None:
        metrics_due, timeout, settling = 0.0, _METRICS_PERIOD_S, iter(_SETTLE_S)
        heap = HeapTrimmer()
        while not self._is_drained():
            try:
                step = self._steps.get(timeout=_WRITING_PAUSE_S if self._long else timeout)
            except queue.Empty:
                step, metrics_due = StepOutputs(), metrics_due if self._long else 0.0
            if step is None:
                self._fail_everything()
                return
            if step:
                self._answer(step)
            if self._long:
                self._send(self._long.write(self._live))
            self._pool.expire()
            now = time.monotonic()
            if now >= metrics_due:
                self._count_spans()
                self._link.send(wire.encode_metrics(self._engine.stats.drain()))
                metrics_due = now + _METRICS_PERIOD_S
                heap.check()
            if step:
                settling = iter(_SETTLE_S)
            timeout = _METRICS_PERIOD_S if self._engine.has_work else next(settling, _METRICS_PERIOD_S)

    def _answer(self, step: StepOutputs) -> None:
        live, holds = self._live, self._long.holds
        due = []
        for output in self._outputs.process(step):
            client = live.get(output.request.handle)
            if client is not None and not holds(client, output):
                due.append(output)
        self._send(due)

    def _send(self, outputs: Sequence[RequestOutput]) -> None:
        live, answers, most_bytes = self._live, [], wire.MAX_RESPONSE_BYTES
        for output in outputs:
            handle = output.request.handle
            client = live.get(handle)
            if client is None:
                continue  # another sequence of a request that was too large
            answer, is_final = self._encode(client, output), output.is_final
            if self._tracer is not None and output.finish_reason is not None:
                self._tracer.ended(client, output)
            if len(answer) > most_bytes:
                answer, is_final = too_large(handle, answer), True
                self._outputs.discard(handle)
                self._engine.cancel(handle)
            if answer:
                answers.append(answer)
            if is_final:
                self._gathered.pop(handle, None)
                if self._tracer is not None:
                    self._tracer.forget(handle)
                self._forget(handle)
        if answers:
            for frame in response_frames(answers):
                self._link.send(frame)

    def _encode(self, client: ClientRequest, output: RequestOutput) -> bytes:
        """The response that is due, or b"" while it waits for other sequences."""
        if not is_gathered(client) or output.finish_reason is FinishReason.ERROR:
            return encode_response(client, output)
        outputs = self._gathered.setdefault(client.handle, [])
        outputs.append(output)
        return encode_gathered(client, outputs) if output.is_final else b""

    def _count_spans(self) -> None:
        if self._tracer is not None:
            exported, dropped = self._tracer.take_counts()
            self._engine.stats.count(Metric.SPANS_EXPORTED, exported)
            self._engine.stats.count(Metric.SPANS_DROPPED, dropped)

    def _is_drained(self) -> bool:
        """After DRAIN: whether nothing runs any more or the time is over. Then all requests have been answered."""
        deadline = self._drain_deadline
        is_busy = bool(self._live) or not self._pool.is_empty
        if deadline is None or (is_busy and time.monotonic() < deadline):
            return False
        self._answer_all(CapacityError("the model was unloaded before the request ended"))
        self._link.send(wire.encode_drained())
        return True

    def _fail_everything(self) -> None:
        """Answer all requests with an error; the backend starts a new process when this one ends."""
        self._exit_status = 1
        self._answer_all(self._engine.error or EngineError("the engine failed"))

    def _answer_all(self, error: Exception) -> None:
        for handle in dict.fromkeys([*self._pool.close(), *self._live]):
            self._link.send(error_answer(handle, error))
