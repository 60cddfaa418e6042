"""The forking process of structured output: loads xgrammar once, then forks. Single-threaded, so that it may fork.

Each grammar first has a trial: it is compiled in a child process with limits of CPU time and memory and a low priority.
The worker that matches (engine/grammar_worker.py) compiles grammars that passed again, because transferring them takes
longer: a schema of 200 properties is 19 MB as JSON, which takes 1.3 s, but compiles in 17 ms. Answers each message at
once, as a sign of life. Ends with its children when the engine closes its socket.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from slipstream.core.sampling_params import Guide
from slipstream.engine.child_process import end_with
from slipstream.engine.grammar_channel import Channel, readable
from slipstream.engine.grammar_compiler import GrammarCompiler, GrammarError
from slipstream.engine.grammar_messages import MAX_KILLS, Setup
from slipstream.engine.grammar_worker import GrammarCache, GrammarWorker, lower_priority
from slipstream.engine.trial_queue import Trial, TrialQueue

_SHORT_TRIAL_S = 0.3  # CPU time in the first lane
_PATIENCE = 6  # wall time between two checks of a trial, as a multiple of its CPU time
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)
_STACKS_BYTES = 512 << 20  # address space for the stacks of a worker's threads


class GrammarProcess:
    """One per engine that has structured-output requests."""

    def __init__(self, channel: Channel, setup: Setup) -> None:
        self._channel = channel
        self._limits = setup.limits
        self._num_words = -(-setup.vocab_size // 32)
        self._compiler = GrammarCompiler(setup.tokenizer_path, setup.vocab_size, setup.eos_token_ids)
        self._own_bytes = _virtual_bytes()
        self._trials = TrialQueue()
        self._workers: dict[int, int] = {}  # generation -> process id

    def serve(self) -> None:
        self._channel.send(("ready",))
        while True:
            fds = [self._channel.socket.fileno(), *(trial.result_fd for trial in self._trials.running)]
            timeout = min((trial.deadline - time.monotonic() for trial in self._trials.running), default=None)
            found = readable(fds, timeout)
            for trial in [trial for trial in self._trials.running if trial.result_fd in found]:
                self._end(trial)
            for trial in [trial for trial in self._trials.running if trial.deadline <= time.monotonic()]:
                self._check_overdue(trial)
            if self._channel.socket.fileno() in found:
                for message in self._channel.receive():
                    self._take(*message)
                    self._channel.send(("received",))
            for trial in self._trials.take():
                self._start(trial)

    def stop(self) -> None:
        for pid in [*(trial.pid for trial in self._trials.running), *self._workers.values()]:
            _kill(pid)

    def _take(self, kind: str, *arguments: object) -> None:
        if kind == "try":
            key, guide = arguments
            assert isinstance(key, bytes) and isinstance(guide, Guide)
            self._queue(Trial(key, guide))
        elif kind == "forget":
            for trial in self._trials.remove(arguments[0]):
                os.close(trial.result_fd)
                _kill(trial.pid)
        elif kind == "worker":
            (generation,) = arguments
            assert isinstance(generation, int)
            self._start_worker(generation)
        elif kind == "kill":
            (generation,) = arguments
            assert isinstance(generation, int)
            self._channel.send(("ended", _is_crash(_kill(self._workers.pop(generation)))))
        else:
            assert kind == "ping"

    # ---- trials

    def _queue(self, trial: Trial) -> None:
        if not self._trials.add(trial):
            self._channel.send(("verdict", trial.key, "full", ""))

    def _seconds(self, trial: Trial) -> float:
        most = self._limits.max_compile_ms / 1e3
        return most if trial.is_long else min(_SHORT_TRIAL_S, most)

    def _start(self, trial: Trial) -> None:
        read_fd, write_fd = os.pipe()
        seconds = self._seconds(trial)
        trial.pid = self._fork(lambda: self._try(trial.guide, seconds, write_fd))
        os.close(write_fd)
        trial.result_fd, trial.deadline, trial.num_ticks = read_fd, time.monotonic() + _PATIENCE * seconds, 0
        self._trials.running.append(trial)

    def _try(self, guide: Guide, seconds: float, write_fd: int) -> None:
        """Run a trial in the child. The kernel kills it when its CPU time is used up."""
        lower_priority()
        self._limit_memory(self._limits.memory_bytes)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            self._compiler.compile(guide)
            verdict = ("good", "")
        except GrammarError as error:
            verdict = ("memory", "") if "bad_alloc" in str(error) else ("bad", str(error))
        except MemoryError:
            verdict = ("memory", "")
        except Exception as error:
            verdict = ("bug", f"{type(error).__name__}: {error}")
        os.write(write_fd, pickle.dumps(verdict))

    def _check_overdue(self, trial: Trial) -> None:
        """Let a trial in the last lane continue while it gets CPU time, whose total is limited: a busy machine says
        nothing about its grammar. A trial without CPU time is stopped or hangs, and ends."""
        num_ticks = _cpu_ticks(trial.pid)
        if self._is_last(trial) and num_ticks > trial.num_ticks:
            trial.num_ticks = num_ticks
            trial.deadline = time.monotonic() + _PATIENCE * self._seconds(trial)
        else:
            self._end(trial)

    def _is_last(self, trial: Trial) -> bool:
        """Whether no lane would give it more time."""
        return self._seconds(trial) >= self._limits.max_compile_ms / 1e3

    def _end(self, trial: Trial) -> None:
        is_overdue = not readable([trial.result_fd], 0)
        result = b"" if is_overdue else os.read(trial.result_fd, 65536)
        os.close(trial.result_fd)
        self._trials.running.remove(trial)
        status = _kill(trial.pid)
        is_spent = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        if result:
            verdict, text = pickle.loads(result)
        elif (is_spent or is_overdue) and not self._is_last(trial):
            self._queue(Trial(trial.key, trial.guide, trial.arrived, is_long=True))
            return
        elif is_spent:
            verdict, text = "time", ""
        elif is_overdue or not _is_crash(status):  # stopped or killed, which says nothing about the grammar
            trial.num_kills += 1
            if trial.num_kills < MAX_KILLS:
                self._queue(trial)
                return
            verdict, text = "killed", ""
        else:  # out of memory, which xgrammar does not survive
            verdict, text = "memory", ""
        self._channel.send(("verdict", trial.key, verdict, text))

    # ---- workers

    def _start_worker(self, generation: int) -> None:
        socket_fd, masks_fd = self._channel.fds[:2]
        del self._channel.fds[:2]
        self._workers[generation] = self._fork(lambda: self._work(socket_fd, masks_fd))
        os.close(socket_fd)
        os.close(masks_fd)

    def _work(self, socket_fd: int, masks_fd: int) -> None:
        self._limit_memory(self._limits.memory_bytes + _STACKS_BYTES + os.fstat(masks_fd).st_size)
        cache = GrammarCache(self._compiler, self._limits.cache_bytes)
        GrammarWorker(socket.socket(fileno=socket_fd), masks_fd, self._num_words, cache).serve()

    def _limit_memory(self, num_bytes: int) -> None:
        most = self._own_bytes + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def _fork(self, run: Callable[[], None]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            end_with(parent)
            self._channel.close()
            silence = os.open(os.devnull, os.O_WRONLY)  # xgrammar logs what clients send
            os.dup2(silence, 2)
            run()
            os._exit(0)
        finally:
            os._exit(1)


def _kill(pid: int) -> int:
    """Returns the wait status."""
    os.kill(pid, signal.SIGKILL)  # a child that has ended is still there until it is waited for
    return os.waitpid(pid, 0)[1]


def _is_crash(status: int) -> bool:
    """Whether a child ended by a failure of its own, not by a signal from outside."""
    return os.WTERMSIG(status) in _CRASHES if os.WIFSIGNALED(status) else os.WEXITSTATUS(status) != 0


def _cpu_ticks(pid: int) -> int:
    """Time that a child has had, in the kernel's ticks of 10 ms or so."""
    with open(f"/proc/{pid}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


def _virtual_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def main() -> NoReturn:
    """Arguments: the socket to the engine, the setup, and the engine's process id to end with the thread that calls."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for engine in sys.argv[3:]:
        end_with(int(engine))
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), is_blocking=True)
    process, status = None, 0
    try:
        process = GrammarProcess(channel, pickle.loads(bytes.fromhex(sys.argv[2])))
        process.serve()
    except ConnectionError:
        pass  # the engine is done
    except Exception:
        traceback.print_exc()
        status = 1
    if process is not None:
        process.stop()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
