"""Puts an engine to sleep, wakes it, and reloads its weights in place.

A command is posted by any thread under the engine's lock, one at a time, and carried out by the engine thread between
two steps once no request is left. From then on new requests are refused, or wake the model where it may.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from slipstream.core.config import EngineConfig
from slipstream.core.control import RELOAD, SLEEP, WAKE_UP, Control
from slipstream.core.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    RequestError,
    SlipstreamError,
    internal_error,
)
from slipstream.core.request import Request
from slipstream.core.setting_values import shown
from slipstream.nn.checkpoint_path import resolve_checkpoint
from slipstream.nn.load import check_model
from slipstream.nn.read_spec import read_spec
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.hardware import Hardware
from slipstream.worker.interface import Worker

logger = logging.getLogger(__name__)
# Before the worker prepares: a client that asks again as soon as it is answered would wait for it each time.
_IDLE_S = 0.09
_OWN = "the model's own, or one below reload_root, a parameter of the model"


@dataclass(slots=True)
class Order:
    """A command under way. deadline: time.monotonic(), when requests that still run are ended. error: of a failure."""

    control: Control
    deadline: float
    done: threading.Event = field(default_factory=threading.Event)
    error: SlipstreamError | None = None

    def wait(self) -> None:
        """Until it is carried out. Raises the error that it ended with."""
        self.done.wait()
        if self.error is not None:
            raise self.error


class Residency:
    """level: 0 awake, 1 asleep with its weights in host memory, 2 without them.

    `refusal` and `post` are called under the engine's lock. close_caches: forgets all that was computed.
    """

    def __init__(self, config: EngineConfig, worker: Worker, close_caches: Callable[[], None]) -> None:
        self._config = config
        self._worker = worker
        self._close_caches = close_caches
        self.order: Order | None = None
        self.level = 0
        self._may_prepare = True
        # time.monotonic() of the first step that had nothing to do; None: the last one had
        self.idle_since: float | None = None

    # ---- any thread, under the engine's lock

    def check_awake(self) -> None:
        """Raises CapacityError while no request can be taken; where one may wake the model, has it waken."""
        order = self.order  # may end meanwhile
        if order is not None and order.control.command != WAKE_UP:
            raise CapacityError(f"the model has been told to {order.control.command}; try again later")
        if self.level and order is None:
            if not self._config.serving.wake_on_request:
                raise CapacityError("the model sleeps: its operator wakes it by wake_up")
            self.post(Control(WAKE_UP))

    def post(self, control: Control) -> Order:
        """Raises CapacityError while another command is under way."""
        order = self.order
        if order is not None:
            raise CapacityError(f"{order.control.command} is under way; try again later")
        now = time.monotonic()
        wait_s = self._config.serving.drain_timeout_s if control.mode == "wait" else 0.0
        self.order = Order(control, now + wait_s)
        return self.order

    # ---- engine thread

    @property
    def is_waking(self) -> bool:
        """Requests behind the command are not taken before it is carried out."""
        return self.order is not None and self.order.control.command == WAKE_UP

    def wake_if_told(self) -> None:
        if self.order is not None and self.is_waking:
            self._carry_out(self.order)

    def check_taken(self) -> None:
        """Raises CapacityError for a request that came before a model that could not be woken."""
        if self.level:
            raise CapacityError("the model sleeps and could not be woken; the server's log says why")

    def ended(self, live: Iterable[Request]) -> list[Request]:
        """The requests that have to end now, so that a command can be carried out."""
        order = self.order
        if order is None or self.is_waking or time.monotonic() < order.deadline:
            return []
        return list(live)

    def carry_out(self, order: Order | None) -> None:
        """No request is left that came before this command. Without one the worker may prepare for those to come, after
        a while without any."""
        now = time.monotonic()
        self.idle_since = now if self.idle_since is None else self.idle_since
        if order is None:
            if self._may_prepare and now - self.idle_since >= _IDLE_S:
                self._may_prepare = not self.level and self._worker.prepare()
        elif order.control.command != WAKE_UP:
            self._carry_out(order)

    def fail(self, error: SlipstreamError) -> None:
        """The engine is dead: nobody waits for it any more."""
        if self.order is not None:
            self._finish(self.order, error)

    # ---- parts

    def _carry_out(self, order: Order) -> None:
        start, failure = time.monotonic(), None
        try:
            self._run(order.control)
        except SlipstreamError as error:
            failure = error
        except Exception as error:
            failure = internal_error(logger, f"{order.control.command} failed", error)
        took = time.monotonic() - start
        if failure is None:
            logger.info("%s took %.2f s", order.control.command, took)
        else:
            logger.error("%s failed after %.2f s: %s", order.control.command, took, failure)
        self._finish(order, failure)
        if failure is not None and self._config.parallel.num_ranks > 1:
            raise EngineError(f"{order.control.command} failed on one of the processes: {failure}")

    def _run(self, control: Control) -> None:
        if control.command == SLEEP:
            self._sleep(max(control.level, self.level))
        elif control.command == RELOAD:
            self._sleep(2)
            self._wake(control.folder)
        elif self.level:
            self._wake(None)

    def _sleep(self, level: int) -> None:
        if not self.level:
            self._close_caches()
        if level != self.level:
            self._worker.sleep(level)
            self.level = level

    def _wake(self, folder: str | None) -> None:
        try:
            self._worker.wake(folder)
        except MemoryError as error:
            raise CapacityError(f"the model sleeps on: no memory for it: {error}") from error
        except RuntimeError as error:
            if "out of memory" not in str(error).lower():
                raise
            raise CapacityError("the model sleeps on: the device has no memory for it") from error
        self.level = 0
        self._may_prepare, self.idle_since = True, None

    def _finish(self, order: Order, error: SlipstreamError | None) -> None:
        order.error, self.order = error, None
        order.done.set()


def allowed_folder(config: EngineConfig, folder: str) -> str:
    """The folder that a client names, if its model may read it: its own, or one below reload_root; "" is its own.

    Raises RequestError, which of other folders does not even say whether they are there.
    """
    if not folder:
        return ""
    refusal = RequestError("reload_folder", f"got {shown(folder)}, accepted: {_OWN}")
    root = config.serving.reload_root
    try:
        path = (Path(root or ".") / folder).resolve()
        is_own = path == Path(config.model.model).resolve()
        is_below = bool(root) and path.is_relative_to(Path(root).resolve())
        if not (is_own or (is_below and path.is_dir())):
            raise refusal
    except (OSError, ValueError, RuntimeError):  # a name too long, a null byte, a circle of links
        raise refusal from None
    return "" if is_own else str(path)


def check_reload(config: EngineConfig, spec: DecoderSpec, hardware: Hardware, folder: str) -> None:
    """Raises RequestError unless the checkpoint fits in place of the model's. Reads only headers."""
    model = replace(config.model, model=folder or config.model.model)
    try:
        if read_spec(resolve_checkpoint(model.model), model.rope_scaling) != spec:
            raise RequestError("reload_folder", "has another architecture or other sizes; accepted: those of the model")
        check_model(model, spec, hardware.device, hardware.dtype, hardware.kv_dtype, hardware.parallel)
    except ConfigError as error:
        raise RequestError("reload_folder", str(error)) from error
