"""The grammar processes as the engine holds them: one that forks, started when it is first needed, and one worker of it
at a time, with the mask matrix that they share. Engine thread; waits for nothing but in `hear`."""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from slipstream.runtime.grammar_channel import Channel, readable
from slipstream.runtime.grammar_messages import Setup

logger = logging.getLogger(__name__)

Message = tuple[Any, ...]
_START = "import sys; sys.path[:] = {path!r}; from slipstream.runtime.grammar_process import main; main()"


class GrammarLink:
    """num_rows: of masks. process_is_lost, worker_is_lost: set when the other end is gone, until it is dropped."""

    def __init__(self, setup: Setup, num_rows: int) -> None:
        self._setup, self._num_rows = setup, num_rows
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Channel | None = None
        self._worker: Channel | None = None
        self._generation = 0
        self.process_is_lost = self.worker_is_lost = False
        self.masks = torch.empty(0, 0, dtype=torch.int32)  # [num_rows, vocab_size / 32] of the worker

    @property
    def has_worker(self) -> bool:
        return self._worker is not None

    def say(self, *message: Any, fds: tuple[int, ...] = ()) -> None:
        """To the process that forks."""
        self.start_process()
        if self._control is None:
            return
        try:
            self._control.send(message, fds)
        except OSError:
            self.process_is_lost = True

    def tell(self, *message: Any) -> None:
        """To the worker."""
        if self._worker is None:
            return  # none could be made: the process counts as lost
        try:
            self._worker.send(message)
        except OSError:
            self.worker_is_lost = True

    def hear(self, timeout: float, on_notice: Callable[..., None], on_answer: Callable[..., None]) -> None:
        """Pass on what has come. Waits `timeout` seconds at most for the first of it."""
        channels = [channel for channel in (self._worker, self._control) if channel is not None]
        if timeout > 0:
            readable([channel.socket.fileno() for channel in channels], timeout)
        if self._worker is not None:
            try:
                messages = self._worker.receive()
            except OSError:
                messages, self.worker_is_lost = [], True
            for message in messages:
                on_answer(*message)
        if self._control is not None:
            try:
                messages = self._control.receive()
            except OSError:
                messages, self.process_is_lost = [], True
            for message in messages:
                on_notice(*message)

    def start_worker(self) -> None:
        """Ask for one.  Where the machine lacks descriptors or memory for it, the process counts as lost."""
        try:
            ours, theirs = socket.socketpair()
            self._worker = Channel(ours, is_blocking=False)
            words = -(-self._setup.vocab_size // 32)
            with theirs, os.fdopen(os.memfd_create("slipstream-grammar-masks"), "r+b", 0) as masks:
                masks.truncate(self._num_rows * words * 4)
                self.masks = torch.frombuffer(mmap.mmap(masks.fileno(), 0), dtype=torch.int32)
                self.masks = self.masks.view(self._num_rows, words)
                self._generation += 1
                self.say("worker", self._generation, fds=(theirs.fileno(), masks.fileno()))
        except OSError as error:
            logger.error("structured output: no worker can be made: %s", error)
            self.process_is_lost = True

    def drop_worker(self) -> None:
        """Kill it, whatever it does. The process that forks tells how it has ended."""
        self.worker_is_lost = False
        if self._worker is not None:
            self._worker.close()
            self._worker = None
            self.say("kill", self._generation)

    def drop_process(self) -> None:
        """The process that forks is gone or not wanted: it and what it has forked ends when its socket is closed."""
        self.process_is_lost = self.worker_is_lost = False
        for channel in (self._worker, self._control):
            if channel is not None:
                channel.close()
        self._worker = self._control = None
        if self._process is not None:
            self._process.poll()

    def start_process(self) -> None:
        """If there is none. It does not listen yet when this returns; one that cannot be started counts as lost."""
        if self._control is not None:
            return
        try:
            self._start_process()
        except OSError as error:
            logger.error("structured output: no process can be started: %s", error)
            self.process_is_lost = True

    def _start_process(self) -> None:
        ours, theirs = socket.socketpair()
        path = [place for place in sys.path if place]  # not the current directory, which anybody may have filled
        arguments = ["-c", _START.format(path=path), str(theirs.fileno()), pickle.dumps(self._setup).hex()]
        # one arena: each costs 64 MiB of address space, which is what the processes are limited in
        environment = os.environ | {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *arguments], pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
            )
        self._control = Channel(ours, is_blocking=False)
