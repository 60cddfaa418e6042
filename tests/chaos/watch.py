"""Memory, file descriptors, threads of the server and its engines over time, and what is left of the dead."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from statistics import median

import psutil
from llm_server import LlmServer
from lost_streams import LostStreams
from processes import asked, children_of, thread_names, zombies_of

PERIOD_S = 1.0
MIN_SAMPLES = 100  # fewer say nothing of growth
MIB = 1 << 20
# growth from the second quarter of a process's life (its first is warm-up) to the last one, that is no leak yet
MAX_RSS_GROWTH, MAX_RSS_GROWTH_MIB = 0.10, 64
MAX_FDS_GROWTH, MAX_THREADS_GROWTH = 24, 8  # clients come and go: connections and stacks of the moment
ENGINE_THREADS = ("slip-supervisor", "slip-watcher", "slip-output")  # of the backend, one each for an engine
MAX_LOST_SHARE = 0.25  # of the streams that clients cancelled: the server loses so many without any backend
ZOMBIE_PATIENCE_S, THREADS_PATIENCE_S = 5.0, 20.0


@dataclass
class Life:
    """One process over time, an engine's with the processes that help it. The server's fds are without lost streams,
    its threads without the backend's own, which are counted by name."""

    name: str
    rss_mib: list[float] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def growth(self, num_held: int = 0) -> list[str]:
        """What grew more than it may; nothing of a short life. num_held: instances of models that server 2.51 may hold,
        each with a thread of its own."""
        if len(self.rss_mib) < MIN_SAMPLES:
            return []
        rss, fds, threads = (_quarters(values) for values in (self.rss_mib, self.fds, self.threads))
        grown = []
        if rss[1] - rss[0] > max(MAX_RSS_GROWTH * rss[0], MAX_RSS_GROWTH_MIB):
            grown.append(f"RSS of {self.name} grew from {rss[0]:.0f} to {rss[1]:.0f} MiB")
        if fds[1] - fds[0] > MAX_FDS_GROWTH:
            grown.append(f"file descriptors of {self.name} grew from {fds[0]:.0f} to {fds[1]:.0f}")
        if threads[1] - threads[0] > MAX_THREADS_GROWTH + num_held:
            grown.append(f"threads of {self.name} grew from {threads[0]:.0f} to {threads[1]:.0f}")
        return grown

    def __str__(self) -> str:
        ranges = [
            f"{values[len(values) // 4]:.0f}-{values[-1]:.0f}" for values in (self.rss_mib, self.fds, self.threads)
        ]
        return f"{self.name}: RSS {ranges[0]} MiB, fds {ranges[1]}, threads {ranges[2]}, {len(self.rss_mib)} samples"


def _quarters(values: list[float] | list[int]) -> tuple[float, float]:
    """Medians of the second quarter and of the last."""
    quarter = len(values) // 4
    return float(median(values[quarter : 2 * quarter])), float(median(values[-quarter:]))


class Watch:
    """Samples from `start` to `stop`, on a thread of its own."""

    def __init__(self, server: LlmServer) -> None:
        self._server, self._is_over = server, threading.Event()
        self._lost = LostStreams(server.pid, int(server.grpc_url.rpartition(":")[2]))
        self.num_lost = 0  # gRPC streams, at the last sample
        self.lives: dict[int, Life] = {}
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def name(self, pid: int, name: str) -> None:
        """What the report calls a process."""
        self.lives.setdefault(pid, Life(name)).name = name

    def _run(self) -> None:
        while not self._is_over.wait(PERIOD_S):
            server = asked(lambda: [psutil.Process(self._server.pid)], [])
            for process in [*server, *own_engines(self._server)]:
                try:
                    is_server = process.pid == self._server.pid
                    helpers = [] if is_server else children_of(process.pid, recursive=True)
                    samples = [_sample(one) for one in (process, *helpers)]
                except psutil.Error:
                    continue
                rss, fds, threads = zip(*samples)
                if process.pid == self._server.pid:
                    self.num_lost = self._lost.count()
                    fds = (*fds, -self.num_lost)
                    threads = (*threads, -num_engine_threads(process.pid))
                life = self.lives.setdefault(process.pid, Life(f"process {process.pid}"))
                life.rss_mib.append(sum(rss))
                life.fds.append(sum(fds))
                life.threads.append(sum(threads))


def num_engine_threads(pid: int) -> int:
    """Threads of the server that the backend has for its engines."""
    return sum(name in ENGINE_THREADS for name in thread_names(pid))


def idle_engine_threads(server: LlmServer) -> str:
    """Why threads of ended engines are left; "" when none are, at the latest after some seconds."""
    deadline = time.monotonic() + THREADS_PATIENCE_S
    while (found := num_engine_threads(server.pid)) > (most := len(ENGINE_THREADS) * len(own_engines(server))):
        if time.monotonic() > deadline:
            return f"{found} threads of engines, more than the {most} of those that run"
        time.sleep(0.2)
    return ""


def too_many_lost(num_lost: int, num_cancelled: int) -> str:
    """Why so many lost streams cannot be the server's cancel race alone; "" when they can."""
    most = MAX_FDS_GROWTH + int(MAX_LOST_SHARE * num_cancelled)
    if num_lost <= most:
        return ""
    return f"{num_lost} gRPC streams are held without a client, more than {most}: {num_cancelled} were cancelled"


def own_engines(server: LlmServer) -> list[psutil.Process]:
    """The server's engines, not what they have just forked."""
    return [engine for engine in server.engines() if asked(engine.ppid, 0) == server.pid]


def _sample(process: psutil.Process) -> tuple[float, int, int]:
    return process.memory_info().rss / MIB, process.num_fds(), process.num_threads()


def zombies(server: LlmServer) -> list[int]:
    """Children of the server that have ended and that it has not asked about for some seconds."""
    deadline = time.monotonic() + ZOMBIE_PATIENCE_S
    while dead := zombies_of(server.pid):
        if time.monotonic() > deadline:
            return dead
        time.sleep(0.2)
    return []
