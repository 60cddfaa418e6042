"""Formats of one engine side by side: tokens/s by batch, ms to the first token by length, and ratios of formats.

    python tests/bench/compare.py --engines slipstream --formats none,fp8,wint4,w4a8_fp8 --out results -- \\
        --measure batch,prefill --batches 1,8,32,64,128 --output-len 128 --prefill-lens 1024,65536 --max-model-len 66560
    python tests/bench/format_table.py results/compare.json more/compare.json

compare.py prints it behind its own table where batches were measured; parts of several runs are put together by the
second command.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from measures import Record

RATIOS = (("fp8", "none"), ("wint4", "none"), ("w4a8_fp8", "wint4"), ("w4a8_fp8", "wint4-fp8kv"), ("w4a8_fp8", "fp8"))
Cells = dict[tuple[str, int], Record]  # by format and batch or length


def table(records: list[Record], engine: str = "slipstream") -> str:
    """Markdown; "" without records of batches."""
    own = [r for r in records if r["engine"] == engine and "skipped" not in r]
    batches = {(r["format"], r["batch"]): r for r in own if r["what"] == "batch"}
    prompts = {(r["format"], r["input_len"]): r for r in own if r["what"] == "prefill"}
    parts = []
    if batches:
        sizes = next(iter(batches.values()))
        title = f"tokens/s while decoding / in all, of {sizes['input_len']} in and {sizes['output_len']} out"
        speeds: list[Callable[[Record], float]] = [lambda r: r["decode_tok_s"], lambda r: r["out_tok_s"]]
        parts.append(_table(title, batches, speeds, lambda r: " / ".join(f"{speed(r):,.0f}" for speed in speeds)))
    if parts and prompts:
        rates: list[Callable[[Record], float]] = [lambda r: 1 / r["ttft_ms"]]
        parts.append(_table("ms to the first token", prompts, rates, lambda r: f"{r['ttft_ms']:,.4g}"))
    return "\n\n".join(parts)


def _table(title: str, cells: Cells, speeds: list[Callable[[Record], float]], show: Callable[[Record], str]) -> str:
    """A row a format, a column a batch or length, then rows of how many times faster one format is than another."""
    names = list(dict.fromkeys(name for name, _ in cells))
    columns = sorted({column for _, column in cells})
    rows = [[name, *(show(cells[name, c]) if (name, c) in cells else "" for c in columns)] for name in names]
    for fast, slow in RATIOS:
        found = [[cells.get((name, column)) for name in (fast, slow)] for column in columns]
        if any(None not in pair for pair in found):
            rows.append([f"**{fast} / {slow}**", *(_ratios(*pair, speeds) for pair in found)])
    head = [[title, *(f"{column:,}" for column in columns)], ["---", *["--:"] * len(columns)]]
    return "\n".join("| " + " | ".join(row) + " |" for row in [*head, *rows])


def _ratios(fast: Record | None, slow: Record | None, speeds: list[Callable[[Record], float]]) -> str:
    if fast is None or slow is None:
        return ""
    return " / ".join(f"{speed(fast) / speed(slow):.2f}" for speed in speeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="compare.json of runs of one shape")
    parser.add_argument("--engine", default="slipstream")
    arguments = parser.parse_args()
    records = [record for path in arguments.files for record in json.loads(path.read_text())]
    print(table(records, arguments.engine) or "no batches were measured")


if __name__ == "__main__":
    main()
