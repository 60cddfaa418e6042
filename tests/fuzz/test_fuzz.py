"""Each fuzzer for a few seconds, from the corpus of the tree: it builds, its corpus is clean, nothing is found.

And the backend in a host without a server: whatever its clients do, each request ends once, by nobody else's doing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "build"))
from compile_backend import compile_backend, find_compiler
from run_fuzzers import CORPUS, SOURCES, Figures, compile_target, find_clang, run_python, run_target
from stress import compile_host, run_stress

SECONDS = 3
MOST_CORPUS_BYTES = 100_000


@pytest.mark.parametrize("target", SOURCES)
def test_the_fuzzer_finds_nothing(target: str, tmp_path: Path) -> None:
    clang = find_clang()
    if clang is None:
        pytest.skip("no clang with libFuzzer")
    found: Figures = run_target(compile_target(clang, target, tmp_path), target, SECONDS, tmp_path)
    assert found.defect == ""
    assert found.executions > len(list((CORPUS / target).iterdir())) > 5 and found.coverage > 100


def test_the_engine_reads_or_refuses_any_request() -> None:
    found = run_python(SECONDS)
    assert found.defect == "" and found.executions > 500


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < MOST_CORPUS_BYTES


def test_requests_end_once_and_no_forged_handle_ends_one(root: Path, tmp_path: Path) -> None:
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    library = compile_backend(root / "install/backends/slipstream")
    done = run_stress(library, compile_host(tmp_path), tmp_path, SECONDS)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 100, done.stdout
