"""One command, one GPU, one run: Slipstream in-process, Slipstream through tritonserver, and vLLM, side by side.

    python tests/bench/compare.py --shape llama3-8b --formats none,fp8 --out results

Every engine runs each format in a process of its own, one after the other, with the same shapes, precision and loops
(measures.py). With --gpus 0,1,2,3 four shapes or formats are under way at a time, each with all engines on one GPU.
Writes results/*.jsonl (every line measured), results/compare.json, results/table.md and results/plot.png (tokens/s over
batch, TTFT over prompt length), and prints the table: ratios are rival over ours, above 1 we are faster; `limit` is the
share of the physical limit. An engine that is not installed is left out, with the reason in the table.
Of `-- --measure batch` our formats stand side by side below it (format_table.py), of several shapes or contexts all
decodes in one table (decode_grid.py).
Options after `--` go to every engine, e.g. `-- --batches 1,8 --measure decode`.

    python tests/bench/compare.py --grid --gpus 0,1 --most-seconds 900 --out results

measures the grid of docs/perf.md (speed_grid.py): vLLM before Slipstream, which then profiles the cells that miss their
aim. --shape and --formats choose among its entries. compare.json and table.md are written after every engine, so a run
that is ended keeps what was measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import queue
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import decode_grid  # noqa: E402
import engine_table  # noqa: E402
import format_table  # noqa: E402
import speed_grid  # noqa: E402
from engine_process import run_program  # noqa: E402
from engine_table import OURS, RIVAL, SERVED  # noqa: E402
from measures import Record, add_settings, read_records  # noqa: E402
from shapes import SHAPES  # noqa: E402


class Format(NamedTuple):
    """What the engines run under one name of a table."""

    quantization: str
    kv_cache_dtype: str
    weight_bytes: float
    kv_bytes: float
    rival: str  # of bench_vllm.py; its KV cache is ours, but for INT8, which it has not
    with_head: bool = False  # quantises lm_head too, which the rival does not, nor does the limit


FORMATS = {
    "none": Format("none", "auto", 2.0, 2.0, "none"),
    "fp8": Format("fp8", "fp8", 1.0, 1.0, "fp8"),
    "w4a8_fp8": Format("w4a8_fp8", "fp8", 0.5195, 1.0, "w4a8_fp8"),
    "w4a8_fp8-head": Format("w4a8_fp8", "fp8", 0.5195, 1.0, "w4a8_fp8", with_head=True),
    "wint4": Format("wint4", "auto", 0.5195, 2.0, "wint4"),
    "wint4-fp8kv": Format("wint4", "fp8", 0.5195, 1.0, "wint4-marlin"),
    "wint8": Format("wint8", "int8", 1.0, 1.0, "wint8"),
    "w8a8_int8": Format("w8a8_int8", "int8", 1.0, 1.0, "w8a8_int8"),
}


def why_absent(engine: str) -> str:
    """Why an engine cannot run here; "" if it can."""
    if engine == SERVED:
        missing = [name for name in ("psutil", "tritonclient") if importlib.util.find_spec(name) is None]
        if missing:
            return f"{' and '.join(missing)} not installed"
        from llm_server import missing_server

        return missing_server()
    return "vLLM is not installed" if engine == RIVAL and importlib.util.find_spec("vllm") is None else ""


class Task(NamedTuple):
    """A shape and format that all engines run, one after the other, on one GPU. options: of the engines' programs."""

    shape: str
    format: str
    options: tuple[str, ...] = ()
    timeout_s: float = 900.0

    @property
    def pair(self) -> tuple[str, str]:
        return self.shape, self.format


def command(engine: str, task: Task, arguments: argparse.Namespace, out: Path, rivals: list[Path]) -> list[str]:
    form = FORMATS[task.format]
    common = ["--shape", task.shape, "--out", str(out), *task.options]
    if engine == OURS:
        common += ["--profile-below", str(decode_grid.least(task.format))] if arguments.grid else []
        common += [part for path in rivals for part in ("--rival", str(path))]
    common += [*arguments.rest, "--weight-bytes", str(form.weight_bytes), "--kv-bytes", str(form.kv_bytes)]
    if engine == RIVAL:
        kv_type = "fp8" if form.kv_cache_dtype == "fp8" else "auto"
        return ["bench_vllm.py", *common, "--format", form.rival, "--kv-cache-dtype", kv_type]
    common += ["--set", f"quantization={form.quantization}", "--set", f"kv_cache_dtype={form.kv_cache_dtype}"]
    if form.with_head:
        common += ["--set", "quantize_lm_head=true"]
    for pair in arguments.set:
        common += ["--set", pair]
    return ["bench_engine.py" if engine == OURS else "bench_triton.py", *common]


def lines_of(engine: str, shape: str, name: str, arguments: argparse.Namespace) -> Path:
    """The file of what an engine measured."""
    path: Path = arguments.out / f"{engine.replace('+', '-')}-{shape}-{name}.jsonl"
    return path


class Comparison:
    """All tasks by all engines. Threads, one a GPU, take the tasks from the top; what they find is saved after every
    engine, for runs that are ended."""

    def __init__(self, arguments: argparse.Namespace, tasks: list[Task]) -> None:
        self._arguments, self._tasks = arguments, tasks
        self._start = time.monotonic()
        self._engines = arguments.engines.split(",")
        self._absent = {engine: reason for engine in self._engines if (reason := why_absent(engine))}
        missing = {"format": "all formats", "what": "failed"}
        self._found: dict[tuple[str, str], list[Record]] = {
            ("", ""): [{"engine": engine, **missing, "reason": reason} for engine, reason in self._absent.items()],
            **{task.pair: [] for task in tasks},
        }
        self._saving = threading.Lock()
        self._is_over = threading.Event()

    @property
    def records(self) -> list[Record]:
        return [record for records in self._found.values() for record in records]

    def run(self) -> None:
        free: queue.SimpleQueue[str] = queue.SimpleQueue()
        for gpu in self._arguments.gpus:
            free.put(gpu)

        def measure_task(task: Task) -> None:
            gpu = free.get()
            try:
                for engine in self._engines:
                    if engine not in self._absent and not self._is_over.is_set():
                        self._keep(task, self._measure(engine, task, gpu))
            except BaseException:
                self._is_over.set()
                raise
            finally:
                free.put(gpu)

        with ThreadPoolExecutor(len(self._arguments.gpus)) as pool:
            try:
                for done in as_completed([pool.submit(measure_task, task) for task in self._tasks]):
                    done.result()
            except BaseException:  # and of Ctrl-C, which ends the engines that run
                self._is_over.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _measure(self, engine: str, task: Task, gpu: str) -> list[Record]:
        begin = time.monotonic()
        label = f"{engine}, {task.shape}, {task.format}"
        most = self._arguments.most_seconds
        if most and begin - self._start > most:
            print(f"---- {label}: not started, {most:g} s are over", file=sys.stderr, flush=True)
            return [failure_of(engine, task, f"not started: the {most:g} s of the run were over")]
        print(f"==== {label}" + (f", GPU {gpu}" if gpu else ""), file=sys.stderr, flush=True)
        rivals = [
            lines_of(RIVAL, task.shape, name, self._arguments)
            for name in decode_grid.rival_formats(task.format)
            if any("tpot_ms" in r for r in self._found.get((task.shape, name), []) if r["engine"] == RIVAL)
        ]
        records = measure(engine, task, self._arguments, gpu, rivals, self._is_over)
        now = time.monotonic()
        print(f"---- {label}: {_took(records, now - begin, now - self._start)}", file=sys.stderr, flush=True)
        return records

    def _keep(self, task: Task, records: list[Record]) -> None:
        with self._saving:
            self._found[task.pair] += records
            save(self.records, self._arguments)


def measure(
    engine: str, task: Task, arguments: argparse.Namespace, gpu: str, rivals: list[Path], is_over: threading.Event
) -> list[Record]:
    """Run one engine with one shape and format. What it measured before it failed, if it does, still counts.

    gpu: the only one that it sees; "": all.  rivals: lines for ratios.
    """
    out = lines_of(engine, task.shape, task.format, arguments)
    out.unlink(missing_ok=True)
    program, *options = command(engine, task, arguments, out, rivals)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu} if gpu else None
    failure = run_program(
        [sys.executable, str(HERE / program), *options],
        out.with_suffix(".log"),
        task.timeout_s,
        is_over,
        environment,
    )
    common = {"shape": task.shape, "format": task.format}
    records = [{"engine": engine, **record, **common} for record in (read_records(out) if out.exists() else [])]
    return [*records, failure_of(engine, task, failure)] if failure else records


def failure_of(engine: str, task: Task, reason: str) -> Record:
    return {"engine": engine, "shape": task.shape, "format": task.format, "what": "failed", "reason": reason}


def _took(records: list[Record], seconds: float, since_start: float) -> str:
    load = next((f" (load {record['load_s']:.0f})" for record in records if "load_s" in record), "")
    num_cells = sum("tpot_ms" in record for record in records)
    failures = "".join(f", {record['reason']}" for record in records if record["what"] == "failed")
    return f"{seconds:.0f} s{load}, {num_cells} decodes{failures}; {since_start:.0f} s of the run"


def tasks_of(arguments: argparse.Namespace) -> list[Task]:
    """Shapes and formats in the order asked for, or those entries of the grid that are asked for."""
    shapes, formats = arguments.shape, arguments.formats
    if not arguments.grid:
        pairs = pairs_of(shapes or "llama3-8b", formats or "none,fp8")
        return [Task(*pair, timeout_s=arguments.timeout or 900.0) for pair in pairs]
    entries = speed_grid.ENTRIES
    shapes = shapes or ",".join({entry.shape for entry in entries})
    pairs = pairs_of(shapes, formats or ",".join({entry.format for entry in entries}))
    return [
        Task(entry.shape, entry.format, entry.options, arguments.timeout or entry.timeout_s)
        for entry in entries
        if (entry.shape, entry.format) in pairs
    ]


def pairs_of(shapes: str, formats: str) -> list[tuple[str, str]]:
    """A shape may have its own formats: llama3-70b:fp8+w4a8_fp8."""
    found: list[tuple[str, str]] = []
    for shape, _, own in (part.partition(":") for part in shapes.split(",")):
        found += itertools.product([shape], own.split("+") if own else formats.split(","))
    return found


def save(records: list[Record], arguments: argparse.Namespace) -> None:
    _write(arguments.out / "compare.json", json.dumps(records, indent=1))
    _write(arguments.out / "table.md", text_of(records, arguments) + "\n")


def _write(path: Path, text: str) -> None:
    """The file is whole or as it was: a run may be killed meanwhile."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


def text_of(records: list[Record], arguments: argparse.Namespace) -> str:
    has_grid = len({(r.get("shape"), r.get("context")) for r in records if r["what"] == "decode"}) > 1
    grid = decode_grid.table(records) if has_grid or arguments.grid else ""
    if grid and arguments.grid:  # which says of each engine that failed what is missing; but not of one that is absent
        return "\n\n".join(
            filter(None, [grid, engine_table.notes([record for record in records if "shape" not in record])])
        )
    return "\n\n".join(filter(None, (grid, engine_table.table(records), format_table.table(records))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--grid", action="store_true", help="what speed_grid.py lists, or those of --shape and --formats"
    )
    several = "one or several of shapes.py, by commas, llama3-8b if not said; llama3-70b:fp8+wint4 has its own formats"
    parser.add_argument("--shape", help=several)
    parser.add_argument("--formats", help=f"of {','.join(FORMATS)}; none,fp8 if not said")
    parser.add_argument("--engines", help=f"{OURS},{SERVED},{RIVAL} if not said, {RIVAL},{OURS} for the grid")
    add_settings(parser, "for Slipstream")
    parser.add_argument("--timeout", type=float, help="seconds for one engine and format: 900, or as the grid says")
    parser.add_argument("--most-seconds", type=float, default=0.0, help="of the run: later, no engine is started")
    parser.add_argument("--gpus", type=lambda text: text.split(","), default=[""], help="by their numbers: 0,1,2,3")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("rest", nargs="*", help="after --: options of every engine")
    arguments = parser.parse_args()
    arguments.engines = arguments.engines or (f"{RIVAL},{OURS}" if arguments.grid else f"{OURS},{SERVED},{RIVAL}")
    pairs = pairs_of(arguments.shape or "llama3-8b", arguments.formats or "none")
    for option, named, accepted in (
        ("--shape", {shape for shape, _ in pairs}, list(SHAPES)),
        ("--formats", {name for _, name in pairs}, list(FORMATS)),
        ("--engines", set(arguments.engines.split(",")), [OURS, SERVED, RIVAL]),
    ):
        if unknown := named - set(accepted):
            parser.error(f"{option}: {', '.join(sorted(unknown))}; accepted: {', '.join(accepted)}")
    tasks = tasks_of(arguments)
    if not tasks:
        parser.error("--grid: no entry has these --shape and --formats; speed_grid.py lists them")
    arguments.out.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(arguments, tasks)
    comparison.run()
    save(comparison.records, arguments)
    reason = engine_table.plot(comparison.records, arguments.out / "plot.png")
    print(text_of(comparison.records, arguments) + (f"\n\n{reason}" if reason else ""))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the engines, too
    main()
