"""The engine's handle on the grammar processes: a forking process, started on first use, and one worker of it at a
time, with the shared mask matrix. Engine thread; waits only in `receive`.

Both must become ready, and the forking process must answer each message, within a time limit; otherwise it counts as
lost and is killed, because a stopped process never notices its closed socket. The limits count CPU time where a busy
machine would make wall time too short.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from slipstream.engine.child_process import start_process
from slipstream.engine.grammar_channel import Channel, readable
from slipstream.engine.grammar_messages import Setup

logger = logging.getLogger(__name__)

MAX_GRAMMAR_START_S = 30.0  # CPU time until the forking process is ready; it needs about 3 s
MAX_GRAMMAR_SILENCE_S = 10.0  # without an answer from the forking process (or its start) and without CPU time
MAX_WORKER_START_S = 30.0  # until a worker is ready: a fork
_PING_S = 1.0  # after its last message, while an answer is expected
_START = "import sys; sys.path[:] = {path!r}; from slipstream.engine.grammar_process import main; main()"


class GrammarLink:
    """num_rows: of the mask matrix. process_is_lost, worker_is_lost: the other end is gone and not dropped yet."""

    def __init__(self, setup: Setup, num_rows: int) -> None:
        self._setup, self._num_rows = setup, num_rows
        self._process: subprocess.Popen[bytes] | None = None
        self._dropped: list[subprocess.Popen[bytes]] = []  # killed, not yet reaped
        self._control: Channel | None = None
        self._worker: Channel | None = None
        self._generation = 0
        self._num_unanswered = 0  # messages to the forking process; its start counts as one
        self._sent_at = self._check_due = self._worker_due = 0.0  # time.monotonic()
        self._cpu_s = self._cpu_s_asked = 0.0  # of the forking process: at the last look, when it was asked
        self.process_is_lost = self.worker_is_lost = False
        self.worker_is_ready = False
        self.masks = torch.empty(0, 0, dtype=torch.int32)  # [num_rows, vocab_size / 32] of the worker

    @property
    def has_worker(self) -> bool:
        return self._worker is not None

    def send_to_process(self, *message: Any, fds: tuple[int, ...] = ()) -> None:
        """Send a message to the forking process."""
        self.start_process()
        if self._control is None:
            return
        now = time.monotonic()
        self._sent_at = now
        if not self._num_unanswered:
            self._check_due = now + MAX_GRAMMAR_SILENCE_S
            self._cpu_s = self._cpu_s_asked = _cpu_seconds(self._process)
        self._num_unanswered += 1
        try:
            self._control.send(message, fds)
        except OSError:
            self.process_is_lost = True

    def send_to_worker(self, *message: Any) -> None:
        """Send a message to the worker."""
        if self._worker is None:
            return  # none could be started: the process counts as lost
        try:
            self._worker.send(message)
        except OSError:
            self.worker_is_lost = True

    def receive(self, timeout: float, on_notice: Callable[..., None], on_answer: Callable[..., None]) -> None:
        """Dispatch received messages; waits at most `timeout` seconds for the first one.

        on_notice: the process is "ready", the "worker" is ready, the "verdict" of a trial, a worker has "ended".
        """
        channels = [channel for channel in (self._worker, self._control) if channel is not None]
        if timeout > 0:
            readable([channel.socket.fileno() for channel in channels], timeout)
        if self._worker is not None:
            try:
                messages = self._worker.receive()
            except OSError:
                messages, self.worker_is_lost = [], True
            for message in messages:
                if message == ("ready",):
                    self.worker_is_ready = True
                    on_notice("worker")
                else:
                    on_answer(*message)
        if self._control is not None:
            try:
                messages = self._control.receive()
            except OSError:
                messages, self.process_is_lost = [], True
            for message in messages:
                if message[0] in ("ready", "received"):
                    self._num_unanswered -= 1
                    self._check_due = time.monotonic() + MAX_GRAMMAR_SILENCE_S
                if message[0] != "received":
                    on_notice(*message)

    def check(self, now: float, is_awaited: bool) -> None:
        """Mark processes that did not answer in time as lost. is_awaited: the forking process owes a message."""
        if self._worker is not None and not self.worker_is_ready and now > self._worker_due:
            logger.warning("a worker of structured output is not ready after %g s: it is killed", MAX_WORKER_START_S)
            self.worker_is_lost = True
        if self._control is None:
            return
        if self._num_unanswered and now > self._check_due and self._hangs(now):
            logger.warning("the process of structured output does not answer: it is killed")
            self.process_is_lost = True
        elif is_awaited and not self._num_unanswered and now > self._sent_at + _PING_S:
            self.send_to_process("ping")

    def _hangs(self, now: float) -> bool:
        """Whether the forking process had no CPU time since the last look, or too much since it was asked."""
        cpu_s, before = _cpu_seconds(self._process), self._cpu_s
        self._check_due, self._cpu_s = now + MAX_GRAMMAR_SILENCE_S, cpu_s
        return cpu_s <= before or cpu_s > self._cpu_s_asked + MAX_GRAMMAR_START_S

    def reap(self) -> None:
        """Reap killed processes that have ended."""
        if self._dropped:
            self._dropped = [process for process in self._dropped if process.poll() is None]

    def start_worker(self) -> None:
        """Request a worker.  If the machine lacks descriptors or memory, the process counts as lost."""
        self.worker_is_ready, self._worker_due = False, time.monotonic() + MAX_WORKER_START_S
        try:
            ours, theirs = socket.socketpair()
            self._worker = Channel(ours, is_blocking=False)
            words = -(-self._setup.vocab_size // 32)
            with theirs, os.fdopen(os.memfd_create("slipstream-grammar-masks"), "r+b", 0) as masks:
                masks.truncate(self._num_rows * words * 4)
                self.masks = torch.frombuffer(mmap.mmap(masks.fileno(), 0), dtype=torch.int32)
                self.masks = self.masks.view(self._num_rows, words)
                self._generation += 1
                self.send_to_process("worker", self._generation, fds=(theirs.fileno(), masks.fileno()))
        except OSError as error:
            logger.error("structured output: no worker can be made: %s", error)
            self.process_is_lost = True

    def drop_worker(self) -> None:
        """Kill the worker. The forking process reports how it ended."""
        self.worker_is_lost = self.worker_is_ready = False
        if self._worker is not None:
            self._worker.close()
            self._worker = None
            self.send_to_process("kill", self._generation)

    def drop_process(self) -> None:
        """Kill the forking process. The kernel ends its children with it."""
        self.process_is_lost = self.worker_is_lost = self.worker_is_ready = False
        for channel in (self._worker, self._control):
            if channel is not None:
                channel.close()
        self._worker = self._control = None
        if self._process is not None:
            self._process.kill()
            self._dropped.append(self._process)
            self._process = None
        self.reap()

    def start_process(self) -> None:
        """Start the forking process if there is none, without waiting for it. On failure it counts as lost."""
        if self._control is not None:
            return
        try:
            self._start_process()
        except OSError as error:
            logger.error("structured output: no process can be started: %s", error)
            self.process_is_lost = True

    def _start_process(self) -> None:
        ours, theirs = socket.socketpair()
        path = [place for place in sys.path if place]  # without the current directory, for safety
        arguments = ["-c", _START.format(path=path), str(theirs.fileno()), pickle.dumps(self._setup).hex()]
        # A stopped process does not see that its socket is closed. The kernel can end it with the thread that starts
        # it, but only the main thread lasts as long as the engine. The backend kills an engine's process group.
        if threading.current_thread() is threading.main_thread():
            arguments.append(str(os.getpid()))
        # one malloc arena: each takes 64 MiB of address space, which is limited
        environment = os.environ | {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = start_process([sys.executable, *arguments], (theirs.fileno(),), environment)
        self._control = Channel(ours, is_blocking=False)
        self._num_unanswered, self._check_due = 1, time.monotonic() + MAX_GRAMMAR_SILENCE_S
        self._cpu_s = self._cpu_s_asked = 0.0


def _cpu_seconds(process: subprocess.Popen[bytes] | None) -> float:
    """CPU time of a process; 0 if there is none."""
    try:
        with open(f"/proc/{process.pid if process is not None else 0}/stat") as file:
            user, system = file.read().rpartition(")")[2].split()[11:13]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
