"""The processes of several workers, of which some cannot be started for a while."""

from __future__ import annotations

import errno

from slipstream.server.workers import Workers


class Process:
    """Records the processes that were started, in order. failing: starts that are refused."""

    started: list[Process]
    num_failing: int
    exitcode = -9

    def __init__(self, announces: bool) -> None:
        self.announces = announces
        self.lives = False

    @property
    def pid(self) -> int:
        return 1 + self.started.index(self)

    def start(self) -> None:
        if Process.num_failing:
            Process.num_failing -= 1
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        self.lives = True
        self.started.append(self)

    def is_alive(self) -> bool:
        return self.lives

    def terminate(self) -> None:
        self.lives = False

    join = kill = lambda *_: None


def test_a_worker_that_cannot_be_started_is_started_later() -> None:
    Process.started, Process.num_failing = [], 0
    workers = Workers(2, Process)  # type: ignore[arg-type]
    workers.start_missing()
    first, second = Process.started
    second.lives, Process.num_failing = False, 2
    for _ in range(2):
        workers.start_missing()
        assert Process.started == [first, second] and first.lives
    workers.start_missing()
    assert len(Process.started) == 3 and Process.started[2].lives
    workers.begin_end()
    workers.end(0.0)
    assert not first.lives and not Process.started[2].lives


def test_the_first_one_of_all_announces_the_gateway_once() -> None:
    Process.started, Process.num_failing = [], 1
    workers = Workers(2, Process)  # type: ignore[arg-type]
    workers.start_missing()
    workers.start_missing()
    Process.started[1].lives, Process.num_failing = False, 1
    workers.start_missing()
    workers.start_missing()
    assert [one.announces for one in Process.started] == [False, True, False]
