"""Speed gates: what tests/bench/bench_engine.py measures beside what is recorded for a GPU's name.

Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("recorded.json")
TOLERANCE = 0.03
FIGURES = {"decode": ("batch", "tpot_ms"), "prefill": ("input_len", "ttft_ms")}  # what -> its size, its figure


@dataclass(frozen=True)
class Gate:
    """measured, recorded: ms a decode step of `size` requests takes, or the first token of a prompt of `size`."""

    format: str
    what: str
    size: int
    measured: float | None
    recorded: float | None

    @property
    def verdict(self) -> str:
        """ok, slower, faster (then the record is out of date), unrecorded (another GPU), or missing (not measured)."""
        if self.measured is None:
            return "missing"
        if self.recorded is None:
            return "unrecorded"
        change = self.measured / self.recorded - 1
        return "ok" if abs(change) <= TOLERANCE else "slower" if change > 0 else "faster"

    @property
    def passes(self) -> bool:
        return self.verdict not in ("slower", "missing")

    def row(self) -> str:
        figures = [" " * 8 if ms is None else f"{ms:8.2f}" for ms in (self.recorded, self.measured)]
        both = self.recorded and self.measured
        change = f"{100 * (self.measured / self.recorded - 1):+6.1f} %" if both else " " * 8  # type: ignore[operator]
        return f"{self.format:10} {self.what:8} {self.size:6} {figures[0]} {figures[1]} {change}  {self.verdict}"


def load_recorded() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(RECORDED.read_text())
    return loaded


def bench_options(recorded: dict[str, Any], name: str) -> list[str]:
    """Options of bench_engine.py for one format, with the sizes that any GPU's record has."""
    sizes: dict[str, set[int]] = {what: set() for what in FIGURES}
    for formats in recorded["gpus"].values():
        for what, figures in formats.get(name, {}).items():
            sizes[what].update(int(size) for size in figures)
    batches, lengths = (",".join(map(str, sorted(sizes[what]))) for what in ("decode", "prefill"))
    options = [*recorded["options"], *recorded["formats"][name], "--measure", "decode,prefill"]
    return [*options, "--batches", batches, "--prefill-lens", lengths]


def gates(recorded: dict[str, Any], gpu: str, name: str, records: list[dict[str, Any]]) -> list[Gate]:
    """A gate for each recorded figure of the format; for a GPU without a record, each measured one."""
    measured = {
        (record["what"], record[FIGURES[record["what"]][0]]): record[FIGURES[record["what"]][1]]
        for record in records
        if record["what"] in FIGURES and "skipped" not in record
    }
    formats = recorded["gpus"].get(gpu, {}).get(name, {})
    known = {(what, int(size)): ms for what, figures in formats.items() for size, ms in figures.items()}
    return [Gate(name, *key, measured.get(key), known.get(key)) for key in (known or measured)]
