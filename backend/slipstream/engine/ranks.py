"""The other ranks of a model that several processes share, as the first one, the engine, has them.

Each is a child process (engine/rank_process.py), or one of another node (engine/remote_ranks.py), that makes every call
of the worker which LeadingWorker makes. If one ends, stops, or keeps a step waiting for longer than rank_timeout_s, all
of them are killed, and the engine fails with RankLostError: ranks hold parts of every request, so none can go on alone.
Engine thread, except where noted.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from slipstream.core.config import EngineConfig
from slipstream.core.errors import ConfigError, EngineError, RankLostError
from slipstream.engine.rank_process import RankSetup
from slipstream.engine.remote_ranks import Joined, Listener, RemoteRank
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.interface import (
    AheadInput,
    DraftInput,
    DraftResult,
    StepInput,
    StepResult,
    Worker,
    WorkerInfo,
)
from slipstream.worker.memory_plan import Hardware, MemoryPlan, free_device_memory
from slipstream.worker.process_group import file_store, interface_of, join, leave, limit_calls
from slipstream.worker.sample.structured_output import GrammarMasks

logger = logging.getLogger(__name__)

_WATCH_PERIOD_S = 0.5  # a rank that is stopped at two looks in a row is lost
_START_TIMEOUT_S = 120.0  # until a process has imported what it needs
_END_TIMEOUT_S = 5.0
_FIND_S = 1.0  # after a failure, to find out whether a lost rank is behind it
FIRST_STAGE_CALLS = ("sample", "result", "draft")  # other stages have no part in what follows the forward pass
_START = "import sys; sys.path[:] = {path!r}; from slipstream.engine.rank_process import main; main()"


class Rank:
    """The process of one other rank, and the connection to it. The process ends with the thread that makes this."""

    def __init__(self, setup: RankSetup) -> None:
        self.number = setup.hardware.parallel.number
        ours, theirs = socket.socketpair()
        path = [place for place in sys.path if place]  # without the current directory, for safety
        arguments = [str(theirs.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START.format(path=path), *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.send(pickle.dumps(setup, pickle.HIGHEST_PROTOCOL))
        self._was_stopped = False
        self.end = _end_of(self._process.pid)

    def send(self, message: bytes) -> None:
        """message: pickled."""
        self.connection.send_bytes(message)

    def receive(self, kind: str, timeout_s: float | None = None) -> Any:
        """The value of the next message. Raises EngineError if it is none of this kind."""
        try:
            if not self.connection.poll(timeout_s):
                raise EngineError(f"rank {self.number} has said nothing for {timeout_s:g} s")
            found, value = self.connection.recv()
        except (EOFError, OSError):
            found, value = "failed", "its process has ended; the server's log may say why"
        if found != kind:
            raise EngineError(f"rank {self.number}: {value}")
        return value

    def poll(self, timeout_s: float) -> tuple[str, Any] | None:
        """The next message, None if there is none, or the process ended without one."""
        try:
            return self.connection.recv() if self.connection.poll(timeout_s) else None
        except (EOFError, OSError):
            return None

    def loss(self) -> str:
        """What has become of the process, "" if it runs. Any one thread."""
        try:
            options = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
            state = os.waitid(os.P_PID, self._process.pid, options)
        except ChildProcessError:
            return f"rank {self.number} has ended"
        if state is None:
            self._was_stopped = False
            return ""
        if state.si_code != os.CLD_STOPPED:
            return f"rank {self.number} has ended"
        was_stopped, self._was_stopped = self._was_stopped, True
        return f"rank {self.number} is stopped" if was_stopped else ""

    def kill(self) -> None:
        """Any thread."""
        self._process.kill()

    def close(self) -> None:
        """End the process: it does so by itself when the connection ends."""
        self.connection.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Ranks:
    """The processes beside this one; none for a model of one rank. free_bytes: of device memory, the least of any rank.

    lost: why the ranks have ended, or None. on_loss: called then, by a thread of its own: the engine's may be stuck.
    """

    def __init__(self, config: EngineConfig, spec: DecoderSpec, hardware: Hardware) -> None:
        self._hardware = hardware
        self._timeout_s, self._node_timeout_s = config.parallel.rank_timeout_s, config.parallel.node_timeout_s
        self._others: list[Rank | RemoteRank] = []
        self._lock = threading.Lock()
        self._is_closing = False
        self._closed = threading.Event()
        self._busy_since = 0.0  # time.monotonic() of a call that runs
        self.lost: RankLostError | None = None
        self.on_loss: Callable[[RankLostError], None] = lambda error: None
        self.free_bytes = free_device_memory(hardware)
        if hardware.parallel.num_ranks > 1:
            try:
                self._start(config, spec)
            except BaseException:
                self.close()
                raise

    def load(self, plan: MemoryPlan, make: Callable[[Hardware], Worker]) -> Worker:
        """The worker that `make` makes here, while the other ranks make theirs. Raises EngineError if one cannot."""
        if not self._others:
            return make(self._hardware)
        try:
            self._send(plan, self._others)
            worker = make(self._hardware)
            for rank in self._others:
                rank.receive("ready")
        except Exception as error:
            raise self._load_failure(error, "ready") from error
        if self._hardware.parallel.num_nodes > 1 and self._hardware.device.type == "cpu":
            limit_calls(self._timeout_s)
        return LeadingWorker(worker, self)

    def begin(self, *call: object, is_step: bool = True) -> None:
        """Have the other ranks make a call; this one makes it until `end`. is_step: rank_timeout_s holds for it."""
        self._busy_since = time.monotonic() if is_step else 0.0
        own_stage = self._others[: self._hardware.parallel.size - 1]
        self._send(call, own_stage if call[0] in FIRST_STAGE_CALLS else self._others)

    def end(self) -> None:
        """Raises RankLostError if another rank was lost meanwhile: what the call computed is worth nothing."""
        self._busy_since = 0.0
        self.check()

    def check(self) -> None:
        """Raises RankLostError if another rank was lost."""
        if self.lost is not None:
            raise self.lost

    def loss_behind_failure(self) -> RankLostError | None:
        """After a call has failed: the loss of a rank that caused it, or None."""
        limit = time.monotonic() + _FIND_S
        while self._others and self.lost is None and time.monotonic() < limit:
            self._look()
            time.sleep(0.02)
        return self.lost

    def close(self) -> None:
        """End the other ranks."""
        with self._lock:
            self._is_closing = True
        for rank in self._others:
            rank.close()
        if self._others:
            leave(self._hardware.device)
            self._folder.cleanup()
        self._others = []
        self._closed.set()

    # ---- parts

    def _send(self, message: object, ranks: Sequence[Rank | RemoteRank]) -> None:
        pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for rank in ranks:
            rank.send(pickled)

    def _start(self, config: EngineConfig, spec: DecoderSpec) -> None:
        own = self._hardware
        self._folder = tempfile.TemporaryDirectory(prefix="slipstream-ranks-")  # for this user only
        path = f"{self._folder.name}/store"
        setup = RankSetup(config, spec, own, path)
        joined = self._other_nodes(config) if own.parallel.num_nodes > 1 else []
        if joined:
            setup = replace(setup, interface=interface_of(joined[0].control.local_address))
        started: Future[None] = Future()
        threading.Thread(target=self._watch, args=(setup, joined, started), name="ranks", daemon=True).start()
        started.result()
        try:
            for rank in self._others:
                rank.receive("hello", _START_TIMEOUT_S)
            store = file_store(path, own, self.check)
            self._hardware = join(store, own, config.model.deterministic, setup.interface)
            found = [rank.receive("memory", _START_TIMEOUT_S) for rank in self._others]
        except Exception as error:
            raise self._load_failure(error, "memory") from error
        self.free_bytes = min(free_device_memory(own), *found)

    def _load_failure(self, error: Exception, awaited: str) -> Exception:
        """What has made a load fail. What another rank says of itself comes first, as it breaks this one's collectives;
        then a loss. awaited: the message that a rank sends which has not failed."""
        if isinstance(error, ConfigError):
            return error
        for rank in self._others:
            while (found := rank.poll(_FIND_S)) is not None and found[0] in ("hello", "memory", awaited):
                pass
            if found is not None:
                return EngineError(f"rank {rank.number}: {found[1]}")
        return self.loss_behind_failure() or error

    def _other_nodes(self, config: EngineConfig) -> list[Joined]:
        parallel = self._hardware.parallel
        listener = Listener(config.parallel, range(parallel.num_local, parallel.num_ranks))
        try:
            return listener.wait(self.check)
        finally:
            listener.close()

    def _watch(self, setup: RankSetup, joined: list[Joined], started: Future[None]) -> None:
        """The thread that starts the other ranks and looks after them: those of this node end with it, so it lives as
        long as they may."""
        try:
            for number in range(1, self._hardware.parallel.num_local):
                self._others.append(Rank(_setup_of(setup, number)))
            for one in joined:
                store = dist.FileStore(setup.store_path)
                self._others.append(RemoteRank(one, store, self._node_timeout_s, _setup_of(setup, one.number)))
        except BaseException as error:
            started.set_exception(error)
        else:
            started.set_result(None)
        ends = [rank.end for rank in self._others if isinstance(rank, Rank) and rank.end is not None]
        while not self._closed.is_set():
            if self.lost is None and not self._is_closing:
                wait(ends, _WATCH_PERIOD_S)  # an end is found at once, also while nothing runs
            else:
                self._closed.wait(_WATCH_PERIOD_S)
            self._look()
        for end in ends:
            os.close(end)

    def _look(self) -> None:
        """Any thread."""
        with self._lock:
            if self.lost is not None or self._is_closing:
                return
            reason = next(filter(None, (rank.loss() for rank in self._others)), "")
            busy_since = self._busy_since
            if not reason and busy_since and time.monotonic() - busy_since > self._timeout_s:
                reason = f"a step has waited for the other ranks for {self._timeout_s:g} s (rank_timeout_s)"
            if not reason:
                return
            self.lost = RankLostError(f"{reason}: the model starts again")
        logger.error("%s", self.lost)
        for rank in self._others:
            rank.kill()
        self.on_loss(self.lost)


class LeadingWorker:
    """The first rank's worker, whose calls the others make too. See interface.Worker."""

    def __init__(self, worker: Worker, ranks: Ranks) -> None:
        self.worker = worker
        self._ranks = ranks

    @property
    def info(self) -> WorkerInfo:
        return self.worker.info

    def execute(self, step: StepInput) -> None:
        self._call("execute", step)

    def sample(self, masks: GrammarMasks) -> None:
        self._call("sample", masks)

    def execute_ahead(self, ahead: AheadInput) -> None:
        self._call("execute_ahead", ahead)

    def result(self, step_id: int) -> StepResult:
        result: StepResult = self._call("result", step_id)
        return result

    def draft(self, drafts: DraftInput) -> DraftResult:
        result: DraftResult = self._call("draft", drafts)
        return result

    def forget(self, sequence_ids: Sequence[int]) -> None:
        self._call("forget", sequence_ids)

    def sleep(self, level: int) -> None:
        self._call("sleep", level, is_step=False)

    def wake(self, model: str) -> None:
        self._call("wake", model, is_step=False)

    def close(self) -> None:
        self.worker.close()

    def _call(self, name: str, argument: object, is_step: bool = True) -> Any:
        self._ranks.begin(name, argument, is_step=is_step)
        result = getattr(self.worker, name)(argument)
        self._ranks.end()
        return result


def _end_of(pid: int) -> int | None:
    """A descriptor that can be read once the process has ended; None where the kernel has none."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _setup_of(first: RankSetup, number: int) -> RankSetup:
    """Of another rank. On its node it has the device of its place there."""
    own = first.hardware
    hardware = replace(own, parallel=own.parallel.of_number(number))
    if own.device.type == "cuda":
        index = (own.device.index or 0) + number % own.parallel.num_local
        hardware = replace(hardware, device=torch.device("cuda", index))
    return replace(first, hardware=hardware)
