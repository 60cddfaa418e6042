"""Run every test that wants a GPU, then quick speed gates; print the commit and leave report.json and report.txt.

    python3 tests/gpu/run_gpu_tests.py --out DIR [--commit HASH] [--shard K/N] [--jobs N] [--skip build,tests,speed]
        [--max-seconds N]

Needs a Python with torch, pytest, pytest-xdist and pytest-timeout, and nvcc; the tree may be a plain folder.  `make
test-gpu` calls it.
A run that is ended, by its time or by SIGTERM, takes its processes with it and reports what had passed and failed.
Exits with 1 if a test fails, a GPU test is skipped for want of a GPU or a compiler, or a figure is more than 3 % above
the recorded one (tests/gpu/recorded.json).  On 16 cores: building takes about two minutes, tests and gates three each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from speed import Gate, bench_options, gates, load_recorded  # noqa: E402

FOLDERS = ("tests/models", "tests/engine", "tests/encoders", "tests/bench")
WANTS_GPU = re.compile(r"torch\.cuda\.is_available|needs_hopper|hopper_device")
WANTS_SEVERAL = re.compile(r"torch\.cuda\.device_count")
FAILED = re.compile(r"\b(?:FAILED|ERROR) tests/\S+")
VERDICT = re.compile(r"^\[gw\d+\].* (PASSED|FAILED|ERROR|SKIPPED) tests/", re.M)
COUNTED = {"PASSED": "passed", "FAILED": "failure", "ERROR": "error", "SKIPPED": "skipped"}  # as JUnit has them
WITHOUT_GPU = re.compile(r"needs an? (CUDA|Hopper|GPU)|no (CUDA device|Hopper GPU|nvcc)|needs a GPU", re.I)
MAX_SECONDS = {"build": 300, "tests": 420, "alone": 300, "speed": 180}  # of a stage; of `speed` for each format
GIB_OF_A_PROCESS = 8  # of a GPU, at most
MAX_TEST_SECONDS = 150  # of a test alone: one that hangs must not take the others' verdicts with it
ABOUT = """
import json, platform, torch, triton
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
gib = torch.cuda.get_device_properties(0).total_memory >> 30 if gpu else 0
print(json.dumps({"gpu": gpu, "GiB": gib, "python": platform.python_version(), "torch": torch.__version__,
                  "triton": triton.__version__, "cuda": torch.version.cuda}))
"""


@dataclass
class Report:
    """ok: whether all stages passed.  problems: what did not, a line each."""

    commit: str
    about: dict[str, Any]
    shard: str
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    gates: list[Gate] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        figures = [{**asdict(gate), "verdict": gate.verdict} for gate in self.gates]
        return {**asdict(self), "gates": figures, "ok": self.ok}

    def as_text(self) -> str:
        lines = [f"commit {self.commit}", f"shard  {self.shard}"]
        lines += [f"{name:6} {value}" for name, value in self.about.items()]
        lines += ["", "seconds: " + ", ".join(f"{name} {took:.0f}" for name, took in self.seconds.items())]
        lines += ["tests: " + ", ".join(f"{count} {name}" for name, count in self.counts.items())]
        lines += [f"  skipped {count:5}  {reason}" for reason, count in self.skipped.items()]
        if self.gates:
            lines += ["", f"{'format':10} {'what':8} {'size':>6} {'recorded':>8} {'measured':>8}   change"]
            lines += [gate.row() for gate in self.gates]
        lines += ["", "PASSED" if self.ok else f"FAILED: {len(self.problems)} problems"]
        return "\n".join([*lines, *(f"- {problem}" for problem in self.problems), ""])


def environment() -> dict[str, str]:
    """The packages are found without being installed; tests compile kernels, and never interpret them."""
    paths = [str(ROOT / folder) for folder in ("backend", "kernels")] + [os.environ.get("PYTHONPATH", "")]
    changes = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}, **changes}


def run_stage(name: str, command: list[str], log: Path, deadline: float = math.inf) -> str | None:
    """Run it with its output in `log`; why it failed, or None. deadline: of time.monotonic."""
    seconds = max(0.0, min(MAX_SECONDS[name], deadline - time.monotonic()))
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"{log.stem}: not done after {seconds:.0f} s, see {log.name}"
        finally:
            if process.poll() is None:  # its workers, which hold the GPU, are of its group
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return f"{log.stem}: exit code {code}, see {log.name}" if code else None


def gpu_test_files(shard: int, num_shards: int) -> list[str]:
    """All of tests/kernels, and elsewhere the files whose text asks for a GPU."""
    files = sorted((ROOT / "tests/kernels").glob("test_*.py"))
    for folder in FOLDERS:
        files += [path for path in sorted((ROOT / folder).glob("test_*.py")) if WANTS_GPU.search(path.read_text())]
    return [str(path.relative_to(ROOT)) for path in files[shard::num_shards]]


def read_junit(path: Path, report: Report) -> None:
    counts, skipped = Counter[str](), Counter[str]()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        found = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        counts["passed" if found is None else found.tag] += 1
        if found is None:
            continue
        if found.tag == "skipped":
            skipped[(found.get("message") or "no reason")[:120]] += 1
            continue
        message = (found.get("message") or "").splitlines()
        first = message[0][:200] if message else ""
        report.problems.append(f"{found.tag}: {case.get('classname')}::{case.get('name')}: {first}")
    report.counts = dict(counts + Counter(report.counts))
    report.skipped = dict((skipped + Counter(report.skipped)).most_common())
    if report.about["gpu"]:
        wanting = sum(count for reason, count in skipped.items() if WITHOUT_GPU.search(reason))
        if wanting:
            report.problems.append(f"{wanting} tests of a GPU were skipped for want of one, or of a compiler")


def run_tests(arguments: argparse.Namespace, report: Report) -> None:
    """Those of several GPUs by themselves, afterwards: their kernels wait for each other, and beside other processes
    they seldom run at the same time."""
    files = gpu_test_files(*arguments.shard)
    alone = [path for path in files if WANTS_SEVERAL.search((ROOT / path).read_text())]
    jobs = processes(arguments.jobs, report.about)
    run_files("tests", [path for path in files if path not in alone], jobs, arguments, report)
    if alone:
        run_files("alone", alone, 1, arguments, report)


def processes(jobs: int, about: dict[str, Any]) -> int:
    """Processes that run tests at once: no more than the GPU's memory holds."""
    gib = int(about.get("GiB", 0))
    return min(jobs, max(1, gib // GIB_OF_A_PROCESS)) if gib else jobs


def run_files(name: str, files: list[str], jobs: int, arguments: argparse.Namespace, report: Report) -> None:
    junit, log = arguments.out / f"{name}.xml", arguments.out / f"{name}.log"
    command = [sys.executable, "-m", "pytest", "-vv", "-n", str(jobs), f"--junitxml={junit}", "-p", "no:cacheprovider"]
    # by a thread: a signal does not reach a test that waits for the GPU
    command += ["-o", f"timeout={MAX_TEST_SECONDS}", "-o", "timeout_method=thread", "--durations=20"]
    junit.unlink(missing_ok=True)
    num_problems = len(report.problems)
    failure: str | None = f"{name}: ended by a signal"
    try:
        failure = run_stage(name, [*command, *files], log, deadline=arguments.deadline)
    finally:
        read_verdicts(junit, log, report)
        if failure is not None and (len(report.problems) == num_problems or not junit.exists()):
            report.problems.append(failure)


def read_verdicts(junit: Path, log: Path, report: Report) -> None:
    if junit.exists():
        read_junit(junit, report)
    else:  # stopped in the middle: what had passed and failed by then
        text = log.read_text(errors="replace")
        told = Counter(COUNTED[verdict] for verdict in VERDICT.findall(text))
        report.counts = dict(told + Counter(report.counts))
        report.problems += sorted(set(FAILED.findall(text)))


def run_build(arguments: argparse.Namespace, report: Report) -> None:
    """All libraries, side by side: built one after the other, in the first tests that want them, they take an hour."""
    command = [sys.executable, "-m", "slipstream_kernels.cuda.build", "--jobs", str(arguments.jobs)]
    failure = run_stage("build", command, arguments.out / "build.log", deadline=arguments.deadline)
    if failure is not None:
        report.problems.append(failure)


def run_speed(arguments: argparse.Namespace, report: Report) -> None:
    """A process a format; the tests have ended, so the GPU is theirs alone."""
    recorded = load_recorded()
    shard, num_shards = arguments.shard
    for name in list(recorded["formats"])[shard::num_shards]:
        out = arguments.out / f"speed-{name}.jsonl"
        out.unlink(missing_ok=True)
        bench = [sys.executable, "tests/bench/bench_engine.py", "--out", str(out), *bench_options(recorded, name)]
        failure = run_stage("speed", bench, out.with_suffix(".log"), deadline=arguments.deadline)
        if failure is not None:
            report.problems.append(failure)
        records = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        report.gates += gates(recorded, report.about["gpu"], name, records)
    bad = [gate for gate in report.gates if not gate.passes]
    report.problems += [f"{gate.verdict}: {gate.format}, {gate.what} {gate.size}" for gate in bad]


def find_commit() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    if not (ROOT / ".git").exists():
        return "unknown (no .git here; name it with --commit)"
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def parse_shard(text: str) -> tuple[int, int]:
    """ "2/3" -> (1, 3)."""
    number, count = (int(part) for part in text.split("/"))
    if not 1 <= number <= count:
        raise argparse.ArgumentTypeError(f"{text}: expected K/N with 1 <= K <= N")
    return number - 1, count


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the report and of all logs")
    parser.add_argument("--commit", default="", help="what is tested, where the tree has no .git")
    parser.add_argument("--shard", type=parse_shard, default=(0, 1), metavar="K/N", help="this part of N of the work")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers, and test processes, at once")
    parser.add_argument("--skip", default="", help="stages to leave out: build, tests, speed")
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="in all, from now on")
    arguments = parser.parse_args(argv)
    arguments.deadline = time.monotonic() + arguments.max_seconds
    return arguments


def run_stages(arguments: argparse.Namespace, report: Report) -> None:
    for name, stage in (("build", run_build), ("tests", run_tests), ("speed", run_speed)):
        if name in arguments.skip.split(",") or (name == "speed" and not report.about["gpu"]):
            continue
        started = time.monotonic()
        try:
            stage(arguments, report)
        finally:
            report.seconds[name] = round(time.monotonic() - started, 1)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    commit = arguments.commit or find_commit()
    print(f"commit {commit}", flush=True)
    told = subprocess.run([sys.executable, "-c", ABOUT], capture_output=True, text=True, check=True).stdout
    shard, num_shards = arguments.shard
    report = Report(commit, json.loads(told), f"{shard + 1}/{num_shards}")
    if not report.about["gpu"]:
        report.problems.append("no GPU: torch.cuda.is_available() is false")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    try:
        run_stages(arguments, report)
    except SystemExit as end:
        report.problems.append(str(end))
    (arguments.out / "report.json").write_text(json.dumps(report.as_json(), indent=1) + "\n")
    (arguments.out / "report.txt").write_text(report.as_text())
    print(report.as_text(), flush=True)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
