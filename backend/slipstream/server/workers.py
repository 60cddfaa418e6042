"""The worker processes of a gateway that has several, as their parent sees them. Its main thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from multiprocessing.process import BaseProcess

logger = logging.getLogger(__name__)


class Workers:
    """make: a worker that is not started; whether it is the first one of all, which announces the gateway."""

    def __init__(self, num_workers: int, make: Callable[[bool], BaseProcess]) -> None:
        self._make = make
        self._workers: list[BaseProcess | None] = [None] * num_workers

    def start_missing(self) -> None:
        """Start those that have not been started or died. One for which there is no memory, file or process now is
        left for the next call; the others serve meanwhile."""
        for index, worker in enumerate(self._workers):
            if worker is not None and worker.is_alive():
                continue
            if worker is not None:
                logger.error("worker %s ended with %s: starting another", worker.pid, worker.exitcode)
            another = self._make(worker is None and index == 0)
            try:
                another.start()
            except OSError as error:
                logger.error("a worker cannot be started, trying again: %s", error)
            else:
                self._workers[index] = another

    def begin_end(self) -> None:
        """Let them end what they serve."""
        for worker in self._started():
            worker.terminate()

    def end(self, timeout_s: float) -> None:
        """timeout_s: for each."""
        for worker in self._started():
            worker.join(timeout_s)
            worker.kill()

    def _started(self) -> list[BaseProcess]:
        return [worker for worker in self._workers if worker is not None]
