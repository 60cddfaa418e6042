"""The grid of docs/perf.md: its entries are known, a run of it keeps and says everything, and nothing of it stays."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import compare
import decode_grid
import engine_process
import kernel_groups
import speed_grid
from bench_vllm import graph_sizes
from measures import parser_of
from shapes import SHAPES

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command with programs instead of the engines'. Returns its records."""

    def run(options: str, vllm: str = "", ours: str = "") -> list[dict[str, Any]]:
        for name, text in (("bench_vllm.py", vllm), ("bench_engine.py", ours)):
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(compare, "HERE", tmp_path)
        monkeypatch.setattr(compare, "why_absent", lambda engine: "")
        monkeypatch.setattr(sys, "argv", ["compare.py", "--grid", "--out", str(tmp_path), *options.split()])
        compare.main()
        records: list[dict[str, Any]] = json.loads((tmp_path / "compare.json").read_text())
        return records

    return run


def fake(times: str, fails: bool = False) -> str:
    """A program that says a decode for each cell; times: an expression of batch and context."""
    return (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests/bench')!r})\n"
        "from measures import emit, parser_of\n"
        "asked, _ = parser_of('').parse_known_args()\n"
        "for context in asked.contexts:\n"
        "    for batch in asked.batches:\n"
        f"        emit({{'what': 'decode', 'batch': batch, 'context': context, 'tpot_ms': {times}}}, asked.out)\n"
        f"sys.exit({3 * fails})\n"
    )


def test_entries_are_known_to_the_programs() -> None:
    pairs = [(entry.shape, entry.format) for entry in speed_grid.ENTRIES]
    assert len(set(pairs)) == len(pairs) and pairs[0] == ("llama3-70b", "fp8")
    for entry in speed_grid.ENTRIES:
        assert entry.shape in SHAPES and entry.format in compare.FORMATS
        asked = parser_of("").parse_args(["--shape", entry.shape, *entry.options])
        assert asked.measure == "decode" and asked.prefix_caching and asked.most_tokens == 800_000
        assert asked.contexts == sorted(asked.contexts) and asked.batches == sorted(asked.batches, reverse=True)
        assert max(asked.contexts) + asked.decode_long <= asked.max_model_len <= SHAPES[entry.shape].max_len
        assert asked.temperature == (1 if SHAPES[entry.shape].experts > 1 else 0)


def test_sizes_of_the_rivals_graphs_are_the_batches() -> None:
    entry = speed_grid.ENTRIES[0]
    assert graph_sizes(parser_of("").parse_args([*entry.options])) == [1, 8, 48, 64, 128, 200, 256]
    assert graph_sizes(parser_of("").parse_args([*entry.options, "--max-num-seqs", "64"])) == [1, 8, 48, 64]
    others = graph_sizes(parser_of("").parse_args(["--measure", "decode,batch", "--batches", "48"]))
    assert {1, 2, 4, 48, 256} <= set(others)


def test_shapes_and_formats_choose_entries(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    found = run("--shape llama3-8b:wint4-fp8kv,qwen2.5-7b --formats fp8 -- --contexts 8", fake("2"), fake("1"))
    cells = [(r["engine"], r["shape"], r["format"], r["context"]) for r in found if r["batch"] == 8]
    assert cells == [
        (engine, *pair, 8)
        for pair in (("qwen2.5-7b", "fp8"), ("llama3-8b", "wint4-fp8kv"))
        for engine in ("vllm", "slipstream")
    ]
    assert {r["batch"] for r in found if r["format"] == "wint4-fp8kv"} == {64, 48, 8, 1}
    assert "---- vllm, qwen2.5-7b, fp8: " in (told := capsys.readouterr().err) and "7 decodes; " in told
    with pytest.raises(SystemExit):
        run("--shape demo")
    assert "no entry has these" in capsys.readouterr().err


def test_the_engine_profiles_what_misses(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one, on a CPU, beside a rival that is far faster behind 16 tokens and far slower behind 8."""
    entry = speed_grid.Entry("demo", "none", contexts=(8, 16), batches=(2, 1))
    monkeypatch.setattr(speed_grid, "ENTRIES", (entry,))
    real = str(ROOT / "tests/bench/bench_engine.py")
    sizes = "--max-model-len 128 --max-num-batched-tokens 256 --decode-long 6 --decode-repeats 1"
    ours = f"import runpy, sys; sys.argv[1:] += {sizes.split()!r}; runpy.run_path({real!r}, run_name='__main__')"
    settings = "--set device=cpu --set memory_bytes=50000000"
    found = run(settings, fake("1e-9 if context == 16 else 1e9"), ours)
    own = [record for record in found if record["engine"] == "slipstream"]
    timed = {(r["context"], r["batch"]) for r in own if r["what"] == "decode" and "tpot_ms" in r}
    assert timed == {(8, 2), (8, 1), (16, 2), (16, 1)}
    assert sorted((r["context"], r["batch"]) for r in own if r["what"] == "profile") == [(16, 1), (16, 2)]
    _, missing = (tmp_path / "table.md").read_text().split("Less than asked:\n\n")
    assert [line.split(": ")[0] for line in missing.splitlines()] == [
        f"- demo, none, 16 tokens, {batch} requests" for batch in (1, 2)
    ]
    assert all("us a step on the host" in line for line in missing.splitlines())


def test_time_that_is_over_starts_no_engine_and_says_so(run: Run, tmp_path: Path) -> None:
    slow = "import time; time.sleep(1.2)\n"
    found = run("--shape qwen2.5-7b --most-seconds 1 -- --contexts 8 --batches 2", slow + fake("2"), fake("1"))
    assert [(r["engine"], r["format"], r["what"]) for r in found][:3] == [
        ("vllm", "none", "decode"),
        ("slipstream", "none", "failed"),
        ("vllm", "fp8", "failed"),
    ]
    told = (tmp_path / "table.md").read_text()
    assert "- / 2.00" in told and "- qwen2.5-7b, none, slipstream: all: not started: the 1 s" in told
    assert "- qwen2.5-7b, fp8, slipstream and vllm: all: not started: the 1 s of the run were over" in told


def test_an_engine_that_breaks_ends_nothing_and_all_is_saved_after_each(run: Run, tmp_path: Path) -> None:
    """Ours keeps what was saved before it began; in bf16 its time is cut off, in fp8 it ends by itself."""
    saved = f"open({str(tmp_path / 'seen.json')!r}, 'w').write(open({str(tmp_path / 'compare.json')!r}).read())\n"
    hanging = fake("1").replace("sys.exit(0)", "import time; time.sleep(60 * ('none' in asked.out.name))")
    sizes = "-- --contexts 8 --batches 2,1"
    found = run(f"--shape llama3-8b --formats none,fp8 --timeout 6 {sizes}", fake("2", True), saved + hanging)
    reasons = [(r["engine"], r["format"], r["reason"]) for r in found if r["what"] == "failed"]
    assert [reason[:2] for reason in reasons] == [("vllm", "none"), ("slipstream", "none"), ("vllm", "fp8")]
    assert reasons[0][2].startswith("exit code 3") and reasons[1][2] == "not done after 6 s"
    assert sum(record["what"] == "decode" for record in found) == 8
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen == found[: len(found) - 2], "all but what ours measured last"


def test_the_rivals_of_4_bits_are_both(run: Run) -> None:
    """Those that were measured by then, of this run alone."""
    told = (
        "emit({'what': 'x', 'rivals': [path.name for path in asked.rival], 'below': asked.profile_below}, asked.out)\n"
    )
    for _ in range(2):
        options = "--shape llama3-8b --formats none,w4a8_fp8,wint4-fp8kv -- --contexts 8 --batches 1"
        found = run(options, fake("2"), fake("1").replace("sys.exit", told + "sys.exit"))
        first, of_own, both = (record for record in found if record["what"] == "x")
        assert (first["rivals"], first["below"]) == (["vllm-llama3-8b-none.jsonl"], 1.05)
        assert of_own["rivals"] == ["vllm-llama3-8b-wint4-fp8kv.jsonl"]
        assert both["rivals"] == ["vllm-llama3-8b-w4a8_fp8.jsonl", "vllm-llama3-8b-wint4-fp8kv.jsonl"]
        assert both["below"] == of_own["below"] == 1.35


def test_the_faster_4_bit_format_of_the_rival_counts() -> None:
    def decode(engine: str, name: str, batch: int, ms: float) -> dict[str, Any]:
        return {
            "engine": engine,
            "shape": "s",
            "format": name,
            "context": 8,
            "batch": batch,
            "what": "decode",
            "tpot_ms": ms,
        }

    records = [
        decode("slipstream", "w4a8_fp8", 1, 2.0),
        decode("slipstream", "w4a8_fp8", 8, 2.0),
        decode("vllm", "w4a8_fp8", 1, 4.0),
        decode("vllm", "w4a8_fp8", 8, 3.0),
        decode("vllm", "wint4-fp8kv", 1, 2.6),
        decode("vllm", "wint4-fp8kv", 8, 3.5),
        decode("slipstream", "wint4-fp8kv", 1, 1.0),
    ]
    grid, note, _, missing, _, empty = decode_grid.table(records).split("\n\n")
    assert grid.splitlines()[2:] == [
        "| s | w4a8_fp8 | 8 | 2.00 / 2.60\N{DAGGER} **(1.30)** | 2.00 / 3.00 **(1.50)** |",
        "| s | wint4-fp8kv | 8 | 1.00 / 2.60 **(2.60)** |  |",
    ]
    assert note.startswith("\N{DAGGER} ") and "Marlin" in note
    assert missing == "- s, w4a8_fp8, 8 tokens, 1 requests: 2.00 / 2.60\N{DAGGER} **(1.30)**"
    assert empty == "- s, wint4-fp8kv, slipstream: 8 x 8: not in this run"


def test_a_profile_is_told_by_what_kernels_do() -> None:
    profile = {
        "idle": 0.0123,
        "us_per_step": {
            "void slipstream::(anonymous namespace)::decode_attention_kernel<slipstr": [1900.4, 32.0],
            "nvjet_tst_128x64_64x10_1x2_h_TNT": [1000.0, 64.0],
            "void swap_ab_gemm_kernel<Shape<64, 64> >(SwapAbParams)": [600.0, 32.0],
            "_rms_norm_kernel": [90.0, 65.0],
            "void grouped_stream_kernel<3>(GroupedStreamParams)": [80.0, 32.0],
            "elsewhere": [70.0, 1.0],
        },
    }
    assert kernel_groups.summary(profile) == (
        "idle 1.2%, us a step: attention 1,900 (decode_attention), products 1,600 (nvjet_tst_128x64_64x10_1x2_h_TNT), "
        "norm 90 (rms_norm), experts 80 (grouped_stream)"
    )
    assert kernel_groups.group_of("elsewhere") == "elsewhere"


def test_nothing_of_a_program_stays(tmp_path: Path) -> None:
    """Neither when it ends before its own process, nor when its time is over."""
    started = "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    started += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid));"
    for end, timeout_s, told in (("sys.exit(2)", 60, "exit code 2"), ("child.wait()", 2, "not done after 2 s")):
        reason = engine_process.run_program(
            [sys.executable, "-c", started + end], tmp_path / "log", timeout_s, threading.Event(), None
        )
        assert reason.startswith(told)
        pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 10
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(pid)


def test_a_run_that_is_ended_ends_its_program(tmp_path: Path) -> None:
    is_over = threading.Event()
    threading.Timer(0.5, is_over.set).start()
    begin = time.monotonic()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert "ended" in engine_process.run_program(command, tmp_path / "log", 60, is_over, None)
    assert time.monotonic() - begin < 30


def is_running(pid: int) -> bool:
    """A process that has ended, but that nobody has waited for, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
