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
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import decode_grid  # noqa: E402
import format_table  # noqa: E402
from measures import RATIO_KEYS, Record, add_settings, are_alike, figure_of, read_records, time_ratio  # noqa: E402
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
OURS, SERVED, RIVAL = "slipstream", "slipstream+triton", "vllm"
FIGURES = {
    "decode": ("tpot_ms", "ms/token"),
    "prefill": ("ttft_ms", "ms"),
    "throughput": ("out_tok_s", "tokens/s"),
    "batch": ("out_tok_s", "tokens/s"),
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


def command(engine: str, shape: str, name: str, arguments: argparse.Namespace, out: Path) -> list[str]:
    form = FORMATS[name]
    common = ["--shape", shape, "--out", str(out), *arguments.rest]
    common += ["--weight-bytes", str(form.weight_bytes), "--kv-bytes", str(form.kv_bytes)]
    if engine == RIVAL:
        kv_type = "fp8" if form.kv_cache_dtype == "fp8" else "auto"
        return ["bench_vllm.py", *common, "--format", form.rival, "--kv-cache-dtype", kv_type]
    common += ["--set", f"quantization={form.quantization}", "--set", f"kv_cache_dtype={form.kv_cache_dtype}"]
    if form.with_head:
        common += ["--set", "quantize_lm_head=true"]
    for pair in arguments.set:
        common += ["--set", pair]
    return ["bench_engine.py" if engine == OURS else "bench_triton.py", *common]


def measure(engine: str, shape: str, name: str, arguments: argparse.Namespace, gpu: str = "") -> list[Record]:
    """Run one engine with one shape and format. What it measured before it failed, if it does, still counts.

    gpu: the only one that it sees; "": all.
    """
    out = arguments.out / f"{engine.replace('+', '-')}-{shape}-{name}.jsonl"
    out.unlink(missing_ok=True)
    program, *options = command(engine, shape, name, arguments, out)
    print(f"==== {engine}, {shape}, {name}", file=sys.stderr, flush=True)
    log = out.with_suffix(".log")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu} if gpu else None
    with log.open("w") as stream:
        try:
            done = subprocess.run(
                [sys.executable, str(HERE / program), *options],
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=arguments.timeout,
                check=False,
                env=environment,
            )
            failure = f"exit code {done.returncode}, see {log.name}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            failure = f"not done after {arguments.timeout} s"
    common = {"shape": shape, "format": name}
    records = [{"engine": engine, **record, **common} for record in (read_records(out) if out.exists() else [])]
    if failure:
        records.append({"engine": engine, **common, "what": "failed", "reason": failure})
    return records


def rows(records: list[Record]) -> Iterator[list[str]]:
    """Table rows: shape and format, measurement, then a cell per engine, the share of the limit, ratios to ours."""
    for ours in records:
        if ours["engine"] != OURS or ours["what"] not in FIGURES or "skipped" in ours:
            continue
        figure, unit = FIGURES[ours["what"]]
        context = f" at {ours['context']}" if "context" in ours else ""
        label = {
            "decode": f"decode, batch {ours.get('batch')}{context}",
            "prefill": f"prefill, {ours.get('input_len')} tokens",
        }
        count = f"{ours.get('num_prompts') or ours.get('batch')} x {ours.get('input_len')}/{ours.get('output_len')}"
        cells = [name_of(ours), label.get(ours["what"], count), unit, f"{ours[figure]:g}"]
        cells.append(f"{ours['limit']:.0%}" if "limit" in ours else "")
        for engine in (SERVED, RIVAL):
            other = next((r for r in records if r["engine"] == engine and _is_same(r, ours)), None)
            cells += [f"{other[figure]:g}", f"{time_ratio(other, ours):.2f}"] if other else ["", ""]
        yield cells


def name_of(record: Record) -> str:
    return f"{record['shape']}, {record['format']}" if "shape" in record else str(record["format"])


def _is_same(one: Record, other: Record) -> bool:
    return figure_of(one) is not None and are_alike(one, other, ("shape", "format", *RATIO_KEYS))


def table(records: list[Record]) -> str:
    head = ["shape, format", "measurement", "unit", OURS, "limit", SERVED, "its time / ours", RIVAL, "its time / ours"]
    lines = [head, ["---"] * len(head), *rows(records)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    notes = [f"- {r['engine']}, {name_of(r)}: {r['reason']}" for r in records if r["what"] == "failed"]
    for r in records:
        if r["what"] == "perf_analyzer":
            notes.append(
                f"- perf_analyzer, {r['format']}, {r['concurrency']} streams of {r['input_len']}/{r['output_len']}: "
                f"{r['out_tok_s']:g} tokens/s"
            )
    return "\n\n".join([text, "\n".join(notes)]) if notes else text


def plot(records: list[Record], path: Path) -> str:
    """Tokens/s over batch and TTFT over prompt length. Returns why there is none, or ""."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (("decode", "batch", "out_tok_s", "tokens/s"), ("prefill", "input_len", "ttft_ms", "TTFT, ms"))
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for axis, (what, x, y, label) in zip(axes, panels):
        lines: dict[str, list[tuple[Any, Any]]] = {}
        for record in records:
            if record["what"] == what and y in record:
                lines.setdefault(f"{record['engine']}, {name_of(record)}", []).append((record[x], record[y]))
        for name, points in lines.items():
            axis.plot(*zip(*sorted(points)), marker="o", label=name)
        axis.set(xscale="log", yscale="log", xlabel=x.replace("_", " "), ylabel=label)
        if lines:
            axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return ""


def measure_all(arguments: argparse.Namespace) -> list[Record]:
    """Every shape in every format by every engine; saved whenever one of them is done, for runs that are ended."""
    engines = arguments.engines.split(",")
    absent = {engine: reason for engine in engines if (reason := why_absent(engine))}
    missing = {"format": "all formats", "what": "failed"}
    found: dict[tuple[str, str], list[Record]] = {}
    found["", ""] = [{"engine": engine, **missing, "reason": reason} for engine, reason in absent.items()]
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    is_over = threading.Event()
    for gpu in arguments.gpus:
        free.put(gpu)

    def measure_one(shape: str, name: str) -> None:
        gpu = free.get()
        try:
            for engine in engines:
                if engine not in absent and not is_over.is_set():
                    found[shape, name] += measure(engine, shape, name, arguments, gpu)
        finally:
            free.put(gpu)

    pairs = pairs_of(arguments.shape, arguments.formats)
    found |= {pair: [] for pair in pairs}
    with ThreadPoolExecutor(len(arguments.gpus)) as pool:
        try:
            for done in as_completed([pool.submit(measure_one, *pair) for pair in pairs]):
                done.result()
                save(records_of(found), arguments.out)
        except BaseException:  # and of Ctrl-C, which ends the engines that run
            is_over.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return records_of(found)


def pairs_of(shapes: str, formats: str) -> list[tuple[str, str]]:
    """Shapes and formats in the order asked for. A shape may have its own formats: llama3-70b:fp8+w4a8_fp8."""
    found: list[tuple[str, str]] = []
    for shape, _, own in (part.partition(":") for part in shapes.split(",")):
        found += itertools.product([shape], own.split("+") if own else formats.split(","))
    return found


def records_of(found: dict[tuple[str, str], list[Record]]) -> list[Record]:
    return [record for records in found.values() for record in records]


def save(records: list[Record], folder: Path) -> None:
    (folder / "compare.json").write_text(json.dumps(records, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    several = "one or several of shapes.py, by commas; llama3-70b:fp8+wint4 has its own formats"
    parser.add_argument("--shape", default="llama3-8b", help=several)
    parser.add_argument("--formats", default="none,fp8", help=",".join(FORMATS))
    parser.add_argument("--engines", default=f"{OURS},{SERVED},{RIVAL}")
    add_settings(parser, "for Slipstream")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one engine and format")
    parser.add_argument("--gpus", type=lambda text: text.split(","), default=[""], help="by their numbers: 0,1,2,3")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("rest", nargs="*", help="after --: options of every engine")
    arguments = parser.parse_args()
    pairs = pairs_of(arguments.shape, arguments.formats)
    for option, named, accepted in (
        ("--shape", {shape for shape, _ in pairs}, list(SHAPES)),
        ("--formats", {name for _, name in pairs}, list(FORMATS)),
        ("--engines", set(arguments.engines.split(",")), [OURS, SERVED, RIVAL]),
    ):
        if unknown := named - set(accepted):
            parser.error(f"{option}: {', '.join(sorted(unknown))}; accepted: {', '.join(accepted)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    records = measure_all(arguments)
    has_grid = len({(r.get("shape"), r.get("context")) for r in records if r["what"] == "decode"}) > 1
    tables = (decode_grid.table(records) if has_grid else "", table(records), format_table.table(records))
    text = "\n\n".join(filter(None, tables))
    reason = plot(records, arguments.out / "plot.png")
    (arguments.out / "table.md").write_text(text + "\n")
    print(text + (f"\n\n{reason}" if reason else ""))


if __name__ == "__main__":
    main()
