"""Matches grammars for the engine in a process that can be killed: one matcher per sequence, masks in shared memory.

A call of xgrammar cannot be interrupted, but releases the GIL. The threads use the leader/follower pattern: the leader
waits for a message, passes the lead on and does the job itself, so a stuck thread delays no other. Jobs of slow
sequences run on threads of low priority, and a thread whose job turns out to be slow lowers its priority. The engine
sends a sequence's next job only after the answer to the previous one. It ends slow jobs by closing the sequence or, at
last, by killing this process.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xgrammar

from slipstream.core.sampling_params import Guide
from slipstream.engine.grammar_channel import Channel, readable
from slipstream.engine.grammar_compiler import GrammarCompiler, first_line
from slipstream.engine.grammar_messages import Answer

_SLOW_S = 0.02  # a longer job continues with a low priority
_LOW_PRIORITY = 10
_NUM_SLOW_THREADS = 8
_MAX_THREADS = 32  # the engine kills a process long before this many threads are stuck


@dataclass(slots=True)
class _Cached:
    lock: threading.Lock = field(default_factory=threading.Lock)
    grammar: xgrammar.CompiledGrammar | None = None
    num_bytes: int = 0


class GrammarCache:
    """LRU cache of compiled grammars by key, limited to max_bytes. Any thread."""

    def __init__(self, compiler: GrammarCompiler, max_bytes: int) -> None:
        self._compiler, self._max_bytes = compiler, max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Cached] = OrderedDict()

    def get(self, key: bytes, guide: Guide) -> xgrammar.CompiledGrammar:
        with self._lock:
            entry = self._entries.setdefault(key, _Cached())
            self._entries.move_to_end(key)
        with entry.lock:
            grammar = entry.grammar
            if grammar is None:
                grammar = entry.grammar = self._compiler.compile(guide)
                entry.num_bytes = grammar.memory_size_bytes + len(guide.text)
        with self._lock:
            while sum(one.num_bytes for one in self._entries.values()) > self._max_bytes:
                self._entries.popitem(last=False)
        return grammar


class _Sequence:
    """One matcher. row: its first row of the mask matrix; the masks of a walk's paths follow. barred: end tokens that
    the matcher knows and the request has not: no mask has them."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, row: int, barred: Sequence[int]) -> None:
        self.matcher = matcher
        self.row = row
        self.barred = barred


@dataclass(slots=True)
class _Job:
    kind: str
    sequence_id: int
    arguments: tuple[Any, ...]
    is_slow: bool
    start: float = 0.0
    is_demoted: bool = False  # its thread has a low priority now


class GrammarWorker:
    """masks: a file of num_rows x words int32."""

    def __init__(self, sock: socket.socket, masks_fd: int, num_words: int, cache: GrammarCache) -> None:
        self._channel = Channel(sock, is_blocking=True)
        memory = mmap.mmap(masks_fd, 0)
        self._masks = np.frombuffer(memory, dtype=np.int32).reshape(-1, num_words)
        self._cache = cache
        self._sequences: dict[int, _Sequence] = {}
        self._lead = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._running: dict[int, _Job] = {}  # by thread
        self._running_lock = threading.Lock()  # prevents demoting a thread for a finished job
        self._num_idle = 0
        self._count_lock = threading.Lock()
        self._slow_threads = ThreadPoolExecutor(_NUM_SLOW_THREADS, initializer=lower_priority)

    def serve(self) -> None:
        """Serve until the engine closes the socket; then the process exits, even if threads are stuck."""
        threading.Thread(target=self._work, daemon=True).start()
        self._channel.send(("ready",))
        threading.Event().wait()  # the main thread does no jobs, because a thread that does may have to end

    def _work(self) -> None:
        """Loop of one thread: lead until there is a job, do it, queue up to lead again."""
        while True:
            with self._count_lock:
                self._num_idle += 1
            with self._lead:
                job = self._next_job()
                with self._count_lock:
                    self._num_idle -= 1
                    is_last = self._num_idle == 0
            if is_last and len(self._running) < _MAX_THREADS:
                threading.Thread(target=self._work, daemon=True).start()
            if job.is_slow:
                self._slow_threads.submit(self._do, job)
            else:
                self._do(job)
            if job.is_demoted:
                return  # a lowered priority cannot be raised again

    def _next_job(self) -> _Job:
        while not self._jobs:
            if readable([self._channel.socket.fileno()], _SLOW_S if self._running else None):
                try:
                    for message in self._channel.receive():
                        self._take(message)
                except OSError:
                    os._exit(0)  # the engine is gone, or done with this process; threads may be stuck in xgrammar
            self._demote()
        return self._jobs.popleft()

    def _take(self, message: tuple[Any, ...]) -> None:
        kind, sequence_id, is_slow, *arguments = message
        if kind == "close":
            self._sequences.pop(sequence_id, None)
        else:
            self._jobs.append(_Job(kind, sequence_id, tuple(arguments), is_slow))

    def _demote(self) -> None:
        now = time.monotonic()
        with self._running_lock:
            for thread_id, job in self._running.items():
                if now - job.start > _SLOW_S and not job.is_demoted and not job.is_slow:
                    job.is_demoted = True
                    os.setpriority(os.PRIO_PROCESS, thread_id, _LOW_PRIORITY)

    def _do(self, job: _Job) -> None:
        thread_id = threading.get_native_id()
        job.start = time.monotonic()
        with self._running_lock:
            self._running[thread_id] = job
        started = time.thread_time()
        try:
            answer = getattr(self, f"_{job.kind}")(job.sequence_id, *job.arguments)
        except MemoryError:
            os._exit(1)
        except Exception as error:  # from xgrammar or a bug here: the request is answered with it
            answer = Answer(first_line(error))
        with self._running_lock:
            del self._running[thread_id]
        answer = answer._replace(cpu_s=time.thread_time() - started)
        try:
            self._channel.send((job.sequence_id, answer))
        except OSError:
            os._exit(0)

    # ---- jobs

    def _open(
        self, sequence_id: int, key: bytes, guide: Guide, ends: list[int], row: int, token_ids: list[int]
    ) -> Answer:
        """Open a matcher and advance it by token_ids, which a previous worker has accepted.

        Without end tokens the matcher has the model's, which are then barred: one without any is at its end where the
        text may end, although other tokens may follow."""
        grammar = self._cache.get(key, guide)
        barred = [] if ends else grammar.tokenizer_info.stop_token_ids
        matcher = xgrammar.GrammarMatcher(
            grammar, override_stop_tokens=ends or None, terminate_without_stop_token=not (ends or barred)
        )
        self._sequences[sequence_id] = sequence = _Sequence(matcher, row, barred)
        return self._accept(sequence, token_ids)

    def _advance(self, sequence_id: int, token_ids: list[int]) -> Answer:
        sequence = self._sequences.get(sequence_id)
        return Answer() if sequence is None else self._accept(sequence, token_ids)

    def _accept(self, sequence: _Sequence, token_ids: list[int]) -> Answer:
        matcher = sequence.matcher
        for token_id in token_ids:
            if not matcher.accept_token(token_id):
                return Answer(f"sampled token {token_id} is not allowed by the grammar")
        if matcher.is_terminated():
            return Answer(is_terminated=True, can_go_on=False)
        can_go_on, may_end = self._fill(sequence, sequence.row)
        return Answer(is_terminated=may_end and not can_go_on, can_go_on=can_go_on)

    def _walk(self, sequence_id: int, paths: list[tuple[int, ...]]) -> Answer:
        """Compute the masks after drafts. paths: from the sequence's current state, which is restored."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return Answer()
        walk, dead = _Walk(sequence.matcher), []
        for index, path in enumerate(paths):
            if not (walk.go(path) and self._fill(sequence, sequence.row + 1 + index)[0]):
                dead.append(index)
        walk.go(())
        return Answer(dead=tuple(dead))

    def _fill(self, sequence: _Sequence, row: int) -> tuple[bool, bool]:
        """Write the allowed next tokens as bits. Returns whether any may follow, and whether one was barred: the text
        may end."""
        sequence.matcher.fill_next_token_bitmask(self._masks, row)
        words, may_end = self._masks[row].view(np.uint32), False
        for token_id in sequence.barred:
            bit = np.uint32(1 << token_id % 32)
            may_end = may_end or bool(words[token_id // 32] & bit)
            words[token_id // 32] &= ~bit
        return bool(words.any()), may_end


class _Walk:
    """Walks over the rows of a draft tree and rolls back only the tokens that the next row does not share."""

    def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
        self._matcher = matcher
        self._taken: list[int] = []

    def go(self, path: tuple[int, ...]) -> bool:
        """Move to the end of `path`. False: the grammar forbids it, or it ends the text."""
        shared = 0
        while shared < min(len(self._taken), len(path)) and self._taken[shared] == path[shared]:
            shared += 1
        if len(self._taken) > shared:
            self._matcher.rollback(len(self._taken) - shared)
            del self._taken[shared:]
        for token_id in path[shared:]:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token_id):
                return False
            self._taken.append(token_id)
        return not self._matcher.is_terminated()


def lower_priority() -> None:
    """Lower the priority of the calling thread only (Linux)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
