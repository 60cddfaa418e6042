"""The table of a run: a line per round, then figures of the whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from traffic import Ledger

KINDS = ("answered", "ended by the server", "cut by the client", "error")
HEADINGS = ("round", "seconds", *KINDS, "failures", "ready again s", "preempted", "drafts kept", "leaked", "unload s")


@dataclass
class RoundFigures:
    """num_leaked: KV blocks that nobody holds, or that are held when nobody asks; -1: the model went while it ran."""

    name: str
    seconds: float = 0.0
    failures: str = ""
    ready_again_s: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    accepted: str = ""
    num_leaked: int = -1
    unload_s: float = 0.0

    def is_held(self, timeout_s: float) -> bool:
        """Whether the server kept the model for as long as the unload was waited for."""
        return self.unload_s >= timeout_s


@dataclass
class Report:
    """lines: figures of the whole run, one sentence each."""

    title: str
    rounds: list[RoundFigures] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def render(self, ledger: Ledger) -> str:
        parts = [self.title, "", *_table([HEADINGS, *(self._cells(figures, ledger) for figures in self.rounds)]), ""]
        parts += ["ways: " + _counts(ledger.ways), "endings: " + _counts(ledger.endings), *self.lines]
        parts += [
            f"{ledger.num_compared} whole texts compared with the quiet run's; "
            f"longest time to the end of an answer {ledger.longest_s:.1f} s",
            f"{ledger.num_faults} violations" + "".join(f"\n  {fault}" for fault in ledger.faults),
        ]
        return "\n".join(parts) + "\n"

    @staticmethod
    def _cells(figures: RoundFigures, ledger: Ledger) -> tuple[str, ...]:
        kinds = (str(ledger.kinds[figures.name, kind]) for kind in KINDS)
        ready = ", ".join(f"{seconds:.1f}" for seconds in figures.ready_again_s)
        leaked = "unseen" if figures.num_leaked < 0 else str(figures.num_leaked)
        counts = (str(figures.num_preemptions), figures.accepted, leaked)
        return (
            figures.name,
            f"{figures.seconds:.0f}",
            *kinds,
            figures.failures,
            ready,
            *counts,
            f"{figures.unload_s:.1f}",
        )


def _counts(counter: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items()))


def _table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
