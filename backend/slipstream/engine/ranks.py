"""The other ranks of a model that several processes share, as the first one, the engine, has them.

Each is a child process (engine/rank_processes.py), or one of another node (engine/remote_ranks.py), that makes every
call of the worker which LeadingWorker makes. If one ends, stops, keeps a step waiting for longer than rank_timeout_s,
or is stuck in a load (load_watch.py), all of them are killed, and the engine fails with RankLostError: ranks hold parts
of every request, so none can go on alone. Engine thread, except where noted.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from slipstream.core.config import EngineConfig, ParallelConfig
from slipstream.core.errors import ConfigError, EngineError, RankLostError, drop_locals
from slipstream.core.load_progress import LoadProgress
from slipstream.engine.load_watch import LoadWatch
from slipstream.engine.meeting_folder import MeetingFolder
from slipstream.engine.rank_process import RankSetup
from slipstream.engine.rank_processes import (
    DONE,
    LOADING_CALLS,
    RankFailure,
    RankProcess,
    RankProcesses,
    failure_of,
)
from slipstream.engine.remote_ranks import Joined, Listener, RemoteRank
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.hardware import Hardware, free_device_memory
from slipstream.worker.interface import (
    AheadInput,
    DraftInput,
    DraftResult,
    StepInput,
    StepResult,
    Worker,
    WorkerInfo,
)
from slipstream.worker.memory_plan import MemoryPlan
from slipstream.worker.process_group import file_store, interface_of, join, leave, limit_calls
from slipstream.worker.sample.structured_output import GrammarMasks

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0  # until a process has imported what it needs
_FIND_S = 1.0  # after a failure, to find out whether another rank is behind it
_LOOK_S = 0.02
_END_S = 3.0  # for the thread that loads, which knows more, to end a load that cannot succeed
FIRST_STAGE_CALLS = ("sample", "result", "draft")  # other stages have no part in what follows the forward pass

EndLoad = Callable[[Exception], object]


class Ranks:
    """The processes beside this one; none for a model of one rank. free_bytes: of device memory, the least of any rank.

    lost: why the ranks have ended, or None.
    """

    def __init__(
        self, parallel: ParallelConfig, processes: RankProcesses | None = None, end_load: EndLoad | None = None
    ) -> None:
        """processes: of ranks that import already; else they begin now. The caller closes this if its load fails.

        end_load: called with what makes a load fail, or with a loss that nobody else is told of (tell_losses), by a
        thread of its own, unless this is closed soon after: the engine's thread may wait for ever for a kernel that
        waits for another rank."""
        self._timeout_s, self._node_timeout_s = parallel.rank_timeout_s, parallel.node_timeout_s
        self._processes = processes or RankProcesses.ahead(parallel)
        self._others: list[RankProcess | RemoteRank] = []  # that have been told their part, or are about to be
        self._folder: MeetingFolder | None = None
        self._lock = threading.Lock()
        self._is_closing = False
        self._busy_since = 0.0  # time.monotonic() of a step that runs
        self._progress, self._load_watch = LoadProgress(), LoadWatch(parallel.rank_load_timeout_s)
        self.lost: RankLostError | None = None
        self._lost_number = 0
        self._failures: dict[int, RankFailure] = {}  # that ranks have told while they load, by their numbers
        self._end_load = end_load
        self._end_timer: threading.Timer | None = None
        self._on_loss: Callable[[RankLostError], None] | None = None  # None while the model loads
        self.free_bytes = 0
        self._made: Worker | None = None  # this rank's

    def meet(self, config: EngineConfig, spec: DecoderSpec, hardware: Hardware) -> None:
        """Tell the other ranks their parts and connect with them. Raises what makes the load fail."""
        self._hardware = hardware
        self.free_bytes = free_device_memory(hardware)
        if hardware.parallel.num_ranks > 1:
            self._processes.start(hardware.parallel.num_local)
            self._others += self._processes.ranks
            self._processes.watch(self._look)
            joined = self._other_nodes(config) if hardware.parallel.num_nodes > 1 else []
            try:
                self._meet(RankSetup(config, spec, hardware), joined)
            except Exception as error:
                raise self._cause_of(error) from error

    def load(self, plan: MemoryPlan, make: Callable[[Hardware], Worker]) -> Worker:
        """The worker that `make` makes here, while the other ranks make theirs. Raises EngineError if one cannot."""
        if not self._others:
            return make(self._hardware)
        self._watch_load()
        try:
            self._send(plan, self._others)
            worker = self._made = make(self._hardware)
            for rank in self._others:
                rank.receive("ready")
        except Exception as error:
            raise self._cause_of(error) from error
        self._load_watch.end()
        if self._hardware.parallel.num_nodes > 1 and self._hardware.device.type == "cpu":
            limit_calls(self._timeout_s)
        return LeadingWorker(worker, self)

    def tell_losses(self, on_loss: Callable[[RankLostError], None]) -> None:
        """From now on, the model is loaded: have this called when ranks are lost, by a thread of its own, as the
        engine's may be stuck. Raises RankLostError if they are lost already."""
        with self._lock:
            self.check()
            self._on_loss = on_loss

    def begin(self, *call: object, is_step: bool = True) -> None:
        """Have the other ranks make a call; this one makes it until `end`. is_step: rank_timeout_s holds for it."""
        self._busy_since = time.monotonic() if is_step else 0.0
        if call[0] in LOADING_CALLS:
            self._watch_load()
        own_stage = self._others[: self._hardware.parallel.size - 1]
        self._send(call, own_stage if call[0] in FIRST_STAGE_CALLS else self._others)

    def end(self) -> None:
        """Raises RankLostError if another rank was lost meanwhile: what the call computed is worth nothing."""
        self._busy_since = 0.0
        self._load_watch.end()
        self.check()

    def await_all(self) -> None:
        """Until the other ranks have made the call, one of ANSWERED_CALLS. They began it with this one, which has made
        it: rank_timeout_s holds from now on. Raises RankLostError if one does not come."""
        self._busy_since = time.monotonic()
        try:
            for rank in self._others:
                rank.receive(DONE)
        except EngineError as error:
            lost = self.loss_behind_failure()
            if lost is None:
                raise
            raise lost from error
        self.end()

    def check(self) -> None:
        """Raises RankLostError if another rank was lost."""
        if self.lost is not None:
            raise self.lost

    def loss_behind_failure(self) -> RankLostError | None:
        """After a call has failed: the loss of a rank that caused it, or None."""
        limit = time.monotonic() + _FIND_S
        while self._others and self.lost is None and time.monotonic() < limit:
            self._look()
            time.sleep(_LOOK_S)
        return self.lost

    def close(self, failure: BaseException | None = None) -> None:
        """End the other ranks. The worker is closed already, unless a load has failed: with what."""
        with self._lock:
            self._is_closing = True
        if isinstance(failure, Exception) and self._others:
            self._limit_end(failure)
        if failure is not None:
            self.kill()  # they may wait for this one, and see no end of their connections
            drop_locals(failure)
            if self._made is not None:
                self._made.close()
        self._made = None
        for rank in self._others:
            rank.hang_up()
        self._processes.close()
        if self._folder is not None:
            leave(self._hardware.device)
            self._folder.close()
        self._others, self._folder = [], None
        if self._end_timer is not None:
            self._end_timer.cancel()

    def kill(self) -> None:
        """All at once, so that the call that is under way fails. Any thread."""
        for rank in {*self._others, *self._processes.ranks}:
            rank.kill()

    def remove_folder(self) -> None:
        """For a process that ends without `close`, and its ranks with it: the folder would be left."""
        if self._folder is not None:
            self._folder.close()

    # ---- parts

    def _send(self, message: object, ranks: Sequence[RankProcess | RemoteRank]) -> None:
        pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for rank in ranks:
            rank.send(pickled)

    def _meet(self, setup: RankSetup, joined: list[Joined]) -> None:
        own = setup.hardware
        self._folder = MeetingFolder()
        setup = replace(setup, store_path=self._folder.store_path)
        if joined:
            setup = replace(setup, interface=interface_of(joined[0].control.local_address))
        for one in joined:
            self._others.append(RemoteRank(one, dist.FileStore(setup.store_path), self._node_timeout_s))
        for rank in self._others:
            rank.begin(_setup_of(setup, rank.number))
        for rank in self._others:
            rank.receive("hello", _START_TIMEOUT_S)
        self._watch_load()
        self._hardware = self._joined(setup)
        found = [rank.receive("memory", _START_TIMEOUT_S) for rank in self._others]
        self.free_bytes = min(free_device_memory(own), *found)

    def _joined(self, setup: RankSetup) -> Hardware:
        """Raises what `join` raises, or EngineError that names the ranks which have not come to it."""
        own = setup.hardware
        store = file_store(setup.store_path, own, self.check)
        try:
            met = join(store, own, setup.config.model.deterministic, setup.interface)
        except Exception as error:
            missing = [self._name(number) for number in self._load_watch.numbers_at_work]
            if not missing:
                raise
            raise EngineError(f"{', '.join(missing)}: does not connect: {error}") from error
        return replace(met, parallel=replace(met.parallel, progress=self._progress))

    def _name(self, number: int) -> str:
        parallel = self._hardware.parallel
        node = f" of node {parallel.of_number(number).node}" if parallel.num_nodes > 1 else ""
        return f"rank {number}{node}"

    def _cause_of(self, error: Exception) -> Exception:
        """What has made a load fail. A failure that another rank tells of itself comes first, as it breaks the calls of
        all ranks; then the loss of one. All are listened to at once."""
        if isinstance(error, ConfigError):
            return error
        if isinstance(error, RankFailure):
            self._failures[error.number] = error
        limit = time.monotonic() + _FIND_S
        while True:
            is_last = self.lost is not None or time.monotonic() > limit
            self._failures.update((found.number, found) for found in map(failure_of, self._others) if found is not None)
            own = [failure for failure in self._failures.values() if failure.is_own]
            if own:
                return own[0]
            if is_last:
                return error if self.lost is None else self._failures.get(self._lost_number, self.lost)
            self._look()
            time.sleep(_LOOK_S)

    def _other_nodes(self, config: EngineConfig) -> list[Joined]:
        parallel = self._hardware.parallel
        listener = Listener(config.parallel, range(parallel.num_local, parallel.num_ranks))
        try:
            return listener.wait(self.check)
        finally:
            listener.close()

    def _watch_load(self) -> None:
        self._load_watch.begin(self._progress, [rank.number for rank in self._others])

    def _stuck(self) -> tuple[int, str]:
        """The rank that is stuck in a load and why, or (0, "")."""
        reports = {rank.number: report for rank in self._others if (report := rank.report()) is not None}
        number, reason = self._load_watch.look(reports)
        return number, reason and f"{self._name(number)} {reason}"

    def _look(self) -> bool:
        """Whether ranks are still to be looked after. Any thread."""
        with self._lock:
            if self.lost is not None or self._is_closing:
                return False
            losses = ((rank.number, rank.loss()) for rank in self._others)
            self._lost_number, reason = next((one for one in losses if one[1]), (0, ""))
            if not reason:
                self._lost_number, reason = self._stuck()
            busy_since = self._busy_since
            if not reason and busy_since and time.monotonic() - busy_since > self._timeout_s:
                reason = f"a step has waited for the other ranks for {self._timeout_s:g} s (rank_timeout_s)"
            if not reason:
                return True
            self.lost = RankLostError(f"{reason}: the model starts again")
            on_loss = self._on_loss or self._limit_end
        logger.error("%s", self.lost)
        self.kill()
        on_loss(self.lost)
        return False

    def _limit_end(self, failure: Exception) -> None:
        """Give the thread that loads so long to close this. Any thread."""
        end_load = self._end_load
        if end_load is not None and self._end_timer is None:
            self._end_timer = threading.Timer(_END_S, lambda: end_load(self._cause_of(failure)))
            self._end_timer.daemon = True
            self._end_timer.start()


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

    def prepare(self) -> bool:
        has_more: bool = self._call("prepare")
        return has_more

    def sleep(self, level: int) -> None:
        self._call("sleep", level, is_step=False)
        self._ranks.await_all()  # their memory may be another model's as soon as this has returned

    def wake(self, model: str | None) -> None:
        self._call("wake", model, is_step=False)

    def close(self) -> None:
        self.worker.close()

    def _call(self, name: str, *arguments: object, is_step: bool = True) -> Any:
        try:
            self._ranks.begin(name, *arguments, is_step=is_step)
            result = getattr(self.worker, name)(*arguments)
        except Exception as error:
            lost = None if is_step else self._ranks.loss_behind_failure()  # of a step the engine looks for it
            if lost is None:
                raise
            raise lost from error
        self._ranks.end()
        return result


def _setup_of(first: RankSetup, number: int) -> RankSetup:
    """The setup of another rank. On its node it has the device of its place there."""
    own = first.hardware
    hardware = replace(own, parallel=own.parallel.of_number(number))
    if own.device.type == "cuda":
        index = (own.device.index or 0) + number % own.parallel.num_local
        hardware = replace(hardware, device=torch.device("cuda", index))
    return replace(first, hardware=hardware)
