"""What goes wrong around the server while clients ask: one failure after the other, drawn from the seed."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field

import psutil
from backoff import FIRST_S, Backoff
from clock import Clock
from llm_client import GrpcStream
from llm_server import LlmServer
from outcome import Outcome
from processes import children_of, is_alive
from slipstream.engine.grammar_messages import MAX_KILLS
from traffic import Ledger, Target
from watch import own_engines

# failure -> weight.  A kill costs the start of an engine, the others a second or two
WEIGHTS = {"kill": 1.0, "kill helper": 2.0, "pause": 3.0, "full disk": 2.0, "clock": 3.0, "neighbour": 1.0}
CLOCK_JUMPS_S = (-86400.0, -3600.0, -5.0, 5.0, 3600.0, 86400.0)
REST_S = (0.5, 3.0)  # between two
NEIGHBOUR = "chaos_neighbour"
IMPORTS_PER_START = 2.0
DISK_LIMIT = 4 << 20
MAX_NEIGHBOUR_UNLOAD_S = 10.0
GATEWAY_LAG_S = 3.0  # it asks Triton which models are ready some times a second, less often on busy cores


def seconds_to_import() -> float:
    """What the larger part of an engine's start takes now, on a machine that may be busy with other things."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch, transformers, xgrammar"], check=True)
    return time.monotonic() - began


@dataclass(frozen=True)
class Failure:
    """rest_s: before it. strength: in [0, 1), how long it lasts, or which of several."""

    name: str
    rest_s: float
    strength: float


def schedule(seed: int, length: int, allowed: tuple[str, ...]) -> list[Failure]:
    rng = random.Random(f"failures of {seed}")
    names = rng.choices(allowed, [WEIGHTS[name] for name in allowed], k=length)
    return [Failure(name, rng.uniform(*REST_S), rng.random()) for name in names]


@dataclass
class Downtimes:
    """When a model's engine was away by our doing: errors of requests that touch such a time are explained."""

    times: list[tuple[str, float, float]] = field(default_factory=list)  # model, from, to; infinity while it lasts
    helper_kills: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, model: str) -> None:
        with self.lock:
            self.times.append((model, time.monotonic(), float("inf")))

    def end(self, model: str) -> None:
        with self.lock:
            self.times = [
                (name, since, time.monotonic() if (name, until) == (model, float("inf")) else until)
                for name, since, until in self.times
            ]

    def explains(self, outcome: Outcome) -> bool:
        """A client's short deadline explains its own time-out; else the engine must have been away meanwhile.

        So does the death of as many grammar processes as a request outlasts without a token.
        """
        if outcome.asked.ending == "deadline" and "time" in outcome.error.lower():
            return True
        with self.lock:
            num_kills = sum(outcome.sent <= time <= outcome.ended for time in self.helper_kills)
            if num_kills >= MAX_KILLS and "structured_outputs" in outcome.asked.known.settings:
                return True
            times = [(since, until) for model, since, until in self.times if model == outcome.asked.model]
        if outcome.asked.is_through_gateway:
            times = [(since, until + GATEWAY_LAG_S) for since, until in times]
        return any(outcome.sent <= until and outcome.ended >= since for since, until in times)


class Failures:
    """Makes failures happen, on the thread that calls `run_until`; engine: the process that serves the target."""

    def __init__(
        self, server: LlmServer, clock: Clock, target: Target, downtimes: Downtimes, ledger: Ledger, max_ready_s: float
    ) -> None:
        self._server, self._clock, self._target = server, clock, target
        self._downtimes, self._ledger, self._max_ready_s = downtimes, ledger, max_ready_s
        self.engines: dict[str, psutil.Process] = {}  # by model
        self.counts: Counter[str] = Counter()
        self.ready_again_s: list[float] = []
        self._ready_since: dict[str, float] = {}  # by model
        self._backoffs: defaultdict[str, Backoff] = defaultdict(Backoff)

    def run(self, failure: Failure) -> None:
        self.counts[failure.name] += 1
        {
            "kill": self._kill,
            "kill helper": self._kill_helper,
            "pause": self._pause,
            "full disk": self._fill_disk,
            "clock": self._move_clock,
            "neighbour": self._load_neighbour,
        }[failure.name](failure.strength)

    def load(self, model: str, timeout_s: float) -> float:
        """Load, and remember which process serves it.  Returns the seconds."""
        before, began = {engine.pid for engine in own_engines(self._server)}, time.monotonic()
        self._downtimes.begin(model)  # what the gateway knows of its models lags behind their loading, too
        status, body = self._server.load(model)
        if status != 200:
            raise RuntimeError(f"{model} does not load: {body.decode()}")
        self._adopt(model, before, timeout_s)
        self._downtimes.end(model)
        return time.monotonic() - began

    def unload(self, model: str, timeout_s: float) -> float:
        """Seconds until its engine is gone, or `timeout_s`; what its clients still asked has ended by then."""
        self._downtimes.begin(model)
        began, engine = time.monotonic(), self.engines.pop(model)
        self._server.unload(model)
        while is_alive(engine):
            if time.monotonic() - began > timeout_s:
                return timeout_s
            time.sleep(0.05)
        return time.monotonic() - began

    def _adopt(self, model: str, before: set[int], timeout_s: float) -> None:
        """Until a process that was not there before serves the model."""
        deadline = time.monotonic() + timeout_s
        while True:
            new = [engine for engine in own_engines(self._server) if engine.pid not in before]
            if new and self._server.is_model_ready(model):
                self.engines[model] = new[-1]
                self._ready_since[model] = time.monotonic()
                return
            if not self._server.is_alive():
                raise RuntimeError("the server has ended")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{model} is not ready after {timeout_s:.0f} s")
            time.sleep(0.05)

    def _kill(self, _: float) -> None:
        model = self._target.model
        before = {engine.pid for engine in own_engines(self._server)}
        self._downtimes.begin(model)
        began = time.monotonic()
        backoff_s = self._backoffs[model].next(began - self._ready_since[model])
        self.engines[model].send_signal(signal.SIGKILL)
        try:
            self._adopt(model, before, 6 * self._max_ready_s)
        finally:
            self._downtimes.end(model)
        self.ready_again_s.append(time.monotonic() - began)
        longer_s = backoff_s - FIRST_S  # than after a first kill
        if self.ready_again_s[-1] > self._max_ready_s + longer_s:
            bound = max(self._max_ready_s, IMPORTS_PER_START * seconds_to_import()) + longer_s
            if self.ready_again_s[-1] > bound:
                self._ledger.fault(f"ready again {self.ready_again_s[-1]:.1f} s after a kill, not {bound:.0f}")

    def _kill_helper(self, strength: float) -> None:
        """One of the processes that match grammars, or that begin to: guided requests go on in a new one."""
        helpers = children_of(self.engines[self._target.model].pid, recursive=True)
        if not helpers:
            return  # no grammar was asked for yet, or the last kill was a moment ago
        with self._downtimes.lock:
            self._downtimes.helper_kills.append(time.monotonic())
        try:
            helpers[int(strength * len(helpers))].send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            return  # it was one that tries a grammar, and has ended

    def _pause(self, strength: float) -> None:
        engine = self.engines[self._target.model]
        with suppress(psutil.NoSuchProcess):  # it died by itself, which its requests tell
            engine.send_signal(signal.SIGSTOP)
            time.sleep(0.1 + 2.0 * strength)
            engine.send_signal(signal.SIGCONT)

    def _fill_disk(self, strength: float) -> None:
        """The log and files above 4 MiB cannot grow: writes fail with EFBIG, as on a full disk with ENOSPC.

        A file system of our own would need root. SIGXFSZ is ignored, and the log above that size, from the start
        (run.py). Less would hit memory files, too, which no full disk does.
        """
        processes = [self._server.pid, *(engine.pid for engine in own_engines(self._server))]
        limits: dict[int, tuple[int, int]] = {}
        try:
            for pid in processes:
                with suppress(ProcessLookupError):  # unloaded meanwhile
                    limits[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (DISK_LIMIT, limits[pid][1]))
            time.sleep(0.5 + 2.0 * strength)
        finally:
            for pid, limit in limits.items():
                with suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)

    def _move_clock(self, strength: float) -> None:
        self._clock.set_offset(CLOCK_JUMPS_S[int(strength * len(CLOCK_JUMPS_S))])
        time.sleep(0.5 + strength)
        self._clock.set_offset(0.0)

    def _load_neighbour(self, strength: float) -> None:
        """Another model comes, has a stream that runs when it is unloaded, and goes; the stream finishes."""
        self.load(NEIGHBOUR, 60.0)
        stream = GrpcStream(self._server.grpc_url)
        settings = {"max_tokens": 20 + int(60 * strength), "temperature": 0.0, "ignore_eos": True}
        stream.send(NEIGHBOUR, {"text_input": "a", "stream": True}, parameters=settings)
        error = stream.receive(60.0)[2]
        began = time.monotonic()
        self._server.unload(NEIGHBOUR)
        answer = stream.collect(60.0)
        stream.close()  # server 2.51 keeps a model as long as a gRPC stream is open on which it was asked
        self.unload(NEIGHBOUR, 60.0)
        if error or answer.error:
            self._ledger.fault(f"a stream of {NEIGHBOUR} that ran at its unload: {error or answer.error}")
        if time.monotonic() - began > MAX_NEIGHBOUR_UNLOAD_S:
            self._ledger.fault(f"{NEIGHBOUR} took {time.monotonic() - began:.1f} s to unload behind its last stream")
