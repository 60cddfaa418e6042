"""When a rank is taken for stuck in a load."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from slipstream.core import load_progress
from slipstream.core.load_progress import LoadProgress
from slipstream.engine import load_watch
from slipstream.engine.load_watch import LoadWatch, Report

LIMIT_S = 10.0
OWN = "slipstream.engine.load_watch.Report.of"
AT_BEGINNING = "has done nothing for 10 s (rank_load_timeout_s), at its beginning"


class Watched:
    """A watch of three ranks, with a clock of the test's. says: what ranks 1 and 2 said last; own: of rank 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.own = 100.0, Report("0", "", waits=False)
        monkeypatch.setattr(load_watch, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(OWN, lambda progress, thread_id: self.own)
        self.watch = LoadWatch(LIMIT_S)
        self.watch.begin(LoadProgress(), [1, 2])

    def after(self, seconds: float, **said: Report) -> tuple[int, str]:
        """said: by names such as `rank1`."""
        self.now += seconds
        return self.watch.look({int(name[-1]): report for name, report in said.items()})


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def busy(mark: int) -> Report:
    return Report(str(mark), f"tensor {mark}", waits=False)


def waiting(mark: int = 0) -> Report:
    return Report(str(mark), "", waits=True)


def test_a_load_may_take_any_time_while_each_rank_does_something(watched: Watched) -> None:
    for number in range(50):
        watched.own = busy(number)
        assert watched.after(9.0, rank1=busy(number), rank2=busy(number)) == (0, "")


def test_a_rank_that_does_nothing_is_stuck_whether_it_reports_or_not(watched: Watched) -> None:
    watched.own = waiting()
    assert watched.after(1.0, rank1=busy(1), rank2=busy(1)) == (0, "")
    assert watched.after(9.0, rank1=busy(1), rank2=busy(2)) == (0, "")
    number, reason = watched.after(2.0, rank1=busy(1), rank2=busy(3))
    assert (number, reason) == (1, "has done nothing for 10 s (rank_load_timeout_s), after 'tensor 1'")
    assert watched.after(11.0, rank1=busy(4))[0] == 2, "which says nothing"


def test_a_rank_that_waits_for_others_is_not_stuck_nor_when_it_goes_on(watched: Watched) -> None:
    for number in range(5):
        watched.own = busy(number)
        assert watched.after(9.0, rank1=waiting(), rank2=waiting()) == (0, "")
    watched.own = waiting()
    assert watched.after(9.0, rank1=Report("0", "", waits=False), rank2=waiting()) == (0, "")
    assert watched.after(2.0, rank1=Report("0", "", waits=False), rank2=waiting()) == (1, AT_BEGINNING)


def test_what_a_rank_said_before_it_fell_silent_does_not_count(watched: Watched) -> None:
    """It waited, and may have been stuck since."""
    watched.own = waiting()
    assert watched.after(1.0, rank1=waiting(), rank2=waiting()) == (0, "")
    for number in range(3):
        found = watched.after(5.0, rank2=busy(number))
    assert found[0] == 1


def test_the_first_rank_may_be_the_one(watched: Watched) -> None:
    assert watched.after(9.0, rank1=waiting(), rank2=waiting()) == (0, "")
    assert watched.after(2.0, rank1=waiting(), rank2=waiting()) == (0, AT_BEGINNING)
    assert watched.watch.look({}) == (0, AT_BEGINNING)


def test_ranks_that_all_wait_for_each_other(watched: Watched) -> None:
    watched.own = waiting()
    assert watched.after(9.0, rank1=waiting(), rank2=waiting()) == (0, "")
    number, reason = watched.after(2.0, rank1=waiting(), rank2=waiting())
    assert number == 0 and "waits for the others, which wait too" in reason


def test_nothing_is_watched_between_loads(watched: Watched) -> None:
    watched.watch.end()
    assert watched.after(100.0) == (0, "")
    watched.watch.begin(LoadProgress(), [1, 2])
    assert watched.after(9.0) == (0, ""), "the time begins with the load"


def test_marks_change_with_what_is_done_and_with_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    io = tmp_path / "io"
    monkeypatch.setattr(load_progress, "_IO", io)
    progress = LoadProgress()
    marks = [progress.mark]
    progress.note("a tensor")
    marks.append(progress.mark)
    for read in (4096, 8192):
        io.write_text(f"rchar: 5\nread_bytes: {read}\nwrite_bytes: 1\n")
        marks.append(progress.mark)
    assert len(set(marks)) == 4 and progress.last == "a tensor" and progress.mark == marks[-1]
    subprocess.run([sys.executable, "-c", "import json"], check=True)
    assert progress.mark != marks[-1], "a compiler, say"


def test_who_waits() -> None:
    """A thread whose call is one of those that wait for others, however deep."""
    release, ids = threading.Event(), []
    for module in ("torch.distributed.distributed_c10d", "somewhere"):
        space = {"__name__": module, "release": release}
        exec("def call(inner):\n    inner()", space)
        thread = threading.Thread(target=space["call"], args=(release.wait,))
        thread.start()
        ids.append(thread)
    progress = LoadProgress()
    found = [Report.of(progress, thread.ident or 0).waits for thread in ids]
    release.set()
    for thread in ids:
        thread.join()
    assert found == [True, False]
