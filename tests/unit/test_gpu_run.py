"""tests/gpu/run_gpu_tests.py: what it runs, how it judges figures, and that its report says so.  No GPU needed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from patience import wait_until

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))
import run_gpu_tests
import speed

H200 = "NVIDIA H200"


def test_recorded_figures_are_those_of_the_docs(root: Path) -> None:
    """The first tables of docs/quantization.md are those of Llama-3-8B: ms per token, then ms to the first token."""
    page = (root / "docs/quantization.md").read_text()
    recorded = speed.load_recorded()["gpus"][H200]

    def cells(label: str) -> list[str]:
        row = re.search(rf"^\| {re.escape(label)} \|(.*)\|$", page, re.M)
        assert row, f"docs/quantization.md: no row {label}"
        return [cell.replace("*", "").strip() for cell in row.group(1).split("|")]

    names = ("none", "fp8", "w4a8_fp8")
    for size in ("1", "8", "64", "256"):
        assert {name: recorded[name]["decode"][size] for name in names} == dict(zip(names, map(float, cells(size)[:3])))
    for size in ("1024", "8192"):
        figures = map(float, cells(f"{int(size):,} tokens")[:3])
        assert {name: recorded[name]["prefill"][size] for name in names} == dict(zip(names, figures))


@pytest.mark.parametrize(
    ("measured", "recorded", "verdict", "passes"),
    [
        (4.0, 4.0, "ok", True),
        (4.11, 4.0, "ok", True),
        (4.13, 4.0, "slower", False),
        (3.87, 4.0, "faster", True),
        (4.0, None, "unrecorded", True),
        (None, 4.0, "missing", False),
    ],
)
def test_a_gate_is_three_percent_wide(
    measured: float | None, recorded: float | None, verdict: str, passes: bool
) -> None:
    gate = speed.Gate("fp8", "decode", 8, measured, recorded)
    assert (gate.verdict, gate.passes) == (verdict, passes) and verdict in gate.row()


def test_gates_of_a_format() -> None:
    recorded = {"gpus": {H200: {"fp8": {"decode": {"1": 2.0, "8": 3.0}, "prefill": {"1024": 14.0}}}}}
    records = [
        {"what": "setup", "load_s": 3},
        {"what": "decode", "batch": 1, "tpot_ms": 2.1},
        {"what": "decode", "batch": 8, "skipped": "the KV cache does not hold it"},
        {"what": "prefill", "input_len": 1024, "ttft_ms": 14.1},
    ]
    assert [gate.verdict for gate in speed.gates(recorded, H200, "fp8", records)] == ["slower", "missing", "ok"]
    elsewhere = speed.gates(recorded, "Another GPU", "fp8", records)
    assert [(gate.measured, gate.verdict) for gate in elsewhere] == [(2.1, "unrecorded"), (14.1, "unrecorded")]


def test_options_are_the_benchmarks(root: Path) -> None:
    sys.path.insert(0, str(root / "tests/bench"))
    from measures import parser_of

    recorded = speed.load_recorded()
    for name in recorded["formats"]:
        options = speed.bench_options(recorded, name)
        parser = parser_of("")
        parser.add_argument("--set", action="append", default=[])
        parsed = parser.parse_args(options)
        assert parsed.batches == [1, 8, 64, 256] and parsed.prefill_lens == [1024, 8192]


def test_as_many_processes_as_the_memory_holds() -> None:
    found = [run_gpu_tests.processes(15, about) for about in ({"GiB": 79}, {"GiB": 139}, {"GiB": 6}, {})]
    assert found == [9, 15, 1, 15]


def test_shards_share_out_all_files(root: Path) -> None:
    whole = run_gpu_tests.gpu_test_files(0, 1)
    parts = [run_gpu_tests.gpu_test_files(shard, 3) for shard in range(3)]
    assert sorted(path for part in parts for path in part) == sorted(whole)
    assert {"tests/kernels/test_sample.py", "tests/engine/test_cuda_graphs.py"} <= set(whole)
    texts = {str(path.relative_to(root)): path.read_text() for path in (root / "tests").rglob("test_*.py")}
    wanting = {
        name for name, text in texts.items() if re.search(r"skipif\(\s*not torch\.cuda|^@needs_hopper", text, re.M)
    }
    assert len(wanting) > 10
    assert wanting <= set(whole)
    assert [run_gpu_tests.parse_shard(text) for text in ("1/1", "2/3")] == [(0, 1), (1, 3)]


def test_a_gpu_test_that_is_skipped_is_a_problem(tmp_path: Path) -> None:
    """On a GPU; and failures are named with their first line."""
    (tmp_path / "tests.xml").write_text(
        "<testsuites><testsuite><testcase classname='a' name='good'/>"
        "<testcase classname='a' name='bad'><failure message='assert 1 == 2&#10;more'/></testcase>"
        "<testcase classname='a' name='broken'><error message='no such fixture'/></testcase>"
        "<testcase classname='a' name='cpu'><skipped message='a GPU is present: kernels are compiled'/></testcase>"
        "<testcase classname='a' name='gpu'><skipped message='needs a Hopper GPU'/></testcase>"
        "<testcase classname='a' name='nvcc'><skipped message='no nvcc'/></testcase></testsuite></testsuites>"
    )
    report = run_gpu_tests.Report("abc", {"gpu": H200}, "1/1")
    run_gpu_tests.read_junit(tmp_path / "tests.xml", report)
    assert report.counts == {"passed": 1, "failure": 1, "error": 1, "skipped": 3}
    assert [problem.split(":")[0] for problem in report.problems][:2] == ["failure", "error"]
    assert "assert 1 == 2" in report.problems[0] and report.problems[2].startswith("2 tests of a GPU were skipped")
    assert not report.ok and "FAILED: 3 problems" in report.as_text() and json.dumps(report.as_json())


def test_files_run_in_two_parts_and_what_a_stopped_one_told_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests of several GPUs run by themselves; the first part is stopped before it wrote its verdicts."""
    ran = []

    def run_stage(name: str, command: list[str], log: Path, deadline: float) -> str | None:
        ran.append((name, command[command.index("-n") + 1], command[-1]))
        if name == "tests":
            verdicts = [
                f"{verdict} tests/kernels/test_sample.py::test_draws" for verdict in ("FAILED", "PASSED", "PASSED")
            ]
            log.write_text("".join(f"[gw0] [ 5%] {verdict} \n" for verdict in verdicts))
            return "tests: not done"
        log.with_suffix(".xml").write_text("<testsuites><testcase classname='a' name='b'/></testsuites>")
        return None

    monkeypatch.setattr(run_gpu_tests, "run_stage", run_stage)
    report = run_gpu_tests.Report("abc", {"gpu": H200}, "1/1", counts={"passed": 2})
    arguments = run_gpu_tests.parse_arguments(["--out", str(tmp_path), "--jobs", "4"])
    run_gpu_tests.run_tests(arguments, report)
    assert [part[:2] for part in ran] == [("tests", "4"), ("alone", "1")]
    assert ran[1][2] == "tests/engine/test_several_gpus.py" != ran[0][2]
    assert report.problems == ["FAILED tests/kernels/test_sample.py::test_draws", "tests: not done"]
    assert report.counts == {"passed": 5, "failure": 1}


SLOW = """
import subprocess, time
from pathlib import Path

def test_passes():
    pass

def test_starts_a_process():
    process = subprocess.Popen(["sleep", "600"])
    Path("{}").write_text(str(process.pid))
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["SIGTERM", "its time"])
def test_a_run_that_is_ended_reports_and_leaves_no_process(how: str, tmp_path: Path) -> None:
    """Workers that are left hold the GPU that the next run wants."""
    scripts, pid_file = Path(run_gpu_tests.__file__).parent, tmp_path / "pid"
    shutil.copytree(scripts, tmp_path / "tests/gpu")
    (tmp_path / "tests/kernels").mkdir()
    (tmp_path / "tests/kernels/test_slow.py").write_text(SLOW.format(pid_file))
    options = ["--out", str(tmp_path / "out"), "--commit", "abc", "--skip", "build,speed", "--jobs", "1"]
    options += ["--max-seconds", "30" if how == "its time" else "600"]
    command = [sys.executable, str(tmp_path / "tests/gpu/run_gpu_tests.py"), *options]
    runner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while not (pid_file.exists() and pid_file.read_text()):
        assert runner.poll() is None
        time.sleep(0.1)
    if how == "SIGTERM":
        runner.terminate()
    told, _ = runner.communicate(timeout=60)
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert runner.returncode == 1 and report["counts"] == {"passed": 1} and "FAILED" in told
    assert any("ended by a signal" in one or "not done after" in one for one in report["problems"])
    status = Path(f"/proc/{pid_file.read_text()}/stat")

    def is_gone() -> bool:
        """Or only not waited for."""
        with suppress(FileNotFoundError, ProcessLookupError):
            return status.read_text().split()[2] == "Z"
        return True

    wait_until(is_gone, "the process to end")


def test_the_report_is_left_in_a_plain_folder(root: Path, tmp_path: Path) -> None:
    """Without a GPU it says so, and fails."""
    script = root / "tests/gpu/run_gpu_tests.py"
    options = ["--out", str(tmp_path / "out"), "--commit", "abc123", "--skip", "build,tests,speed"]
    done = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["commit"] == "abc123" and "commit abc123" in done.stdout
    assert (tmp_path / "out/report.txt").read_text() in done.stdout
    assert done.returncode == (not report["ok"]), done.stderr
    assert report["ok"] == bool(report["about"]["gpu"])
