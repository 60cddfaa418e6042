"""Where kernels in CUDA come from: the install, the cache, nvcc; and what is said when none of these has them."""

from __future__ import annotations

import json
import logging
import runpy
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hopper import require_nvcc
from slipstream.commands import examinations
from slipstream_kernels.cuda import build, prebuilt, toolkit
from slipstream_kernels.cuda.write_prebuilt import write_prebuilt
from slipstream_kernels.gemm.cuda.int4_mm import DEQUANTISE

DEFINES = ("NEVER_BUILT",)


@pytest.fixture(autouse=True)
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An install without prebuilt kernels and without nvcc, an empty cache, no driver."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    use_nvcc(monkeypatch, None)
    use_driver(monkeypatch, None)
    forget()
    yield folder
    forget()


def forget() -> None:
    for answer in (build._load, build.build_refusal, build.missing, build._warn):
        answer.cache_clear()
    prebuilt.refusal.cache_clear()
    toolkit.nvcc_version.cache_clear()


def use_nvcc(monkeypatch: pytest.MonkeyPatch, nvcc: Path | None) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: nvcc)
    monkeypatch.setattr(toolkit, "find_nvcc", lambda: nvcc)


def use_driver(monkeypatch: pytest.MonkeyPatch, version: toolkit.Version | None) -> None:
    monkeypatch.setattr(toolkit, "driver_version", lambda: version)


def fake_nvcc(folder: Path, version: str) -> Path:
    """It says its release, and makes an empty file for a library."""
    nvcc = folder / "nvcc"
    nvcc.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "Cuda compilation tools, release {version}, V{version}.1" && exit 0\n'
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && touch "$2"; shift; done\n'
    )
    nvcc.chmod(0o755)
    return nvcc


def put_library(folder: Path, cuda: str = "13.0", defines: tuple[str, ...] = DEFINES) -> Path:
    """A library of DEQUANTISE as a wheel brings it; it has no kernel, but it can be loaded."""
    name = build._library_name(DEQUANTISE, build._options(defines, ()))
    subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", str(folder / name)], check=True)
    (folder / prebuilt.TOOLKIT).write_text(json.dumps({"cuda": cuda}))
    return folder / name


def test_a_prebuilt_library_needs_no_compiler(install: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = put_library(install)
    assert build.missing(DEQUANTISE, DEFINES) is None
    with caplog.at_level(logging.INFO):
        assert build.load(DEQUANTISE, DEFINES)._name == str(library)
    assert f"{DEQUANTISE} NEVER_BUILT: prebuilt" in caplog.text


def test_one_of_other_sources_is_never_loaded(install: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_library(install)
    changed = tmp_path / "csrc"
    shutil.copytree(build.DEVICE_CODE, changed)
    with (changed / "impls" / DEQUANTISE).open("a") as source:
        source.write("// changed\n")
    monkeypatch.setattr(build, "SOURCE_FOLDER", changed / "impls")
    monkeypatch.setattr(build, "DEVICE_CODE", changed)
    assert "do not hold it" in (build.missing(DEQUANTISE, DEFINES) or "")
    with pytest.raises(build.KernelBuildError, match="cannot be built"):
        build.load(DEQUANTISE, DEFINES)


def test_without_any_of_them_the_reason_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    reason = build.missing(DEQUANTISE, DEFINES)
    assert reason is not None and "nvcc is not installed" in reason and "brings no prebuilt kernels" in reason
    build.missing(DEQUANTISE, ("ANOTHER",))
    assert caplog.text.count(f"kernel {DEQUANTISE}: nvcc is not installed") == 1


@pytest.mark.parametrize(
    ("version", "driver", "words"),
    [
        ("11.8", None, "is of CUDA 11.8, older than 12.4"),
        ("13.0", (12, 8), "is of CUDA 13.0, the driver takes 12.8 at most"),
        ("12.8", (12, 4), None),  # runs with every driver of its major version
        ("12.8", (13, 0), None),
    ],
)
def test_a_compiler_whose_libraries_would_not_run_builds_none(
    version: str,
    driver: toolkit.Version | None,
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    use_nvcc(monkeypatch, fake_nvcc(tmp_path, version))
    use_driver(monkeypatch, driver)
    if words is None:
        assert build.missing(DEQUANTISE, DEFINES) is None
        assert build.build(DEQUANTISE, DEFINES).exists()
        return
    assert words in (build.missing(DEQUANTISE, DEFINES) or "")
    with pytest.raises(build.KernelBuildError, match=words):
        build.build(DEQUANTISE, DEFINES)


def test_an_old_driver_takes_a_library_of_its_own_version_instead(
    install: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_library(install, cuda="13.0")
    use_driver(monkeypatch, (12, 8))
    assert "the set of prebuilt kernels is of CUDA 13.0" in (build.missing(DEQUANTISE, DEFINES) or "")
    forget()
    use_nvcc(monkeypatch, fake_nvcc(tmp_path, "12.6"))
    assert build.missing(DEQUANTISE, DEFINES) is None
    built = build.build(DEQUANTISE, DEFINES)
    assert built.parent == build.folder_of((12, 6))


def cache_library(version: toolkit.Version, content: str) -> Path:
    """One of an earlier build by that version of CUDA."""
    library = build.folder_of(version) / build._library_name(DEQUANTISE, build._options(DEFINES, ()))
    library.parent.mkdir(parents=True)
    library.write_text(content)
    return library


def text_of_doctor() -> str:
    return {finding.subject: finding.text for finding in examinations.cuda()}["kernels"]


def test_an_old_driver_takes_no_library_of_the_cache_that_a_later_cuda_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where several machines share a home, or in an image."""
    later = cache_library((13, 0), "later")
    assert build.missing(DEQUANTISE, DEFINES) is None and build.build(DEQUANTISE, DEFINES) == later
    assert "1 libraries of earlier builds" in text_of_doctor() and "are used" in text_of_doctor()
    forget()
    use_driver(monkeypatch, (12, 8))
    assert "no library built before is in the cache" in (build.missing(DEQUANTISE, DEFINES) or "")
    assert text_of_doctor().endswith("Triton-lang's run")
    forget()
    use_nvcc(monkeypatch, fake_nvcc(tmp_path, "12.6"))
    earlier = build.build(DEQUANTISE, DEFINES)
    assert earlier.parent == build.folder_of((12, 6)) and later.read_text() == "later"
    use_driver(monkeypatch, (13, 0))
    assert build.build(DEQUANTISE, DEFINES) == later
    assert "2 libraries of earlier builds" in text_of_doctor()


def test_a_set_for_old_drivers_has_no_library_of_a_later_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_options", lambda defines, flags: build.FLAGS)  # the set's library has this name
    later = cache_library((13, 0), "later")
    use_nvcc(monkeypatch, fake_nvcc(tmp_path, "12.6"))
    monkeypatch.setattr(shutil, "which", lambda name: None)  # what the compiler makes here cannot be stripped
    assert write_prebuilt(tmp_path / "out", [DEQUANTISE]) == 1
    assert (tmp_path / "out" / later.name).read_text() == ""


def test_a_set_is_made_whatever_the_driver_of_the_machine_that_makes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A machine with an older driver refused it, though one without a driver did not."""
    use_nvcc(monkeypatch, fake_nvcc(tmp_path, "13.0"))
    use_driver(monkeypatch, (12, 8))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert write_prebuilt(tmp_path / "out", [DEQUANTISE]) == 1
    assert (tmp_path / "out" / prebuilt.TOOLKIT).read_text() == '{"cuda": "13.0"}\n'


def test_a_cache_that_cannot_be_written_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As that of an image, which is there and is read-only."""
    use_nvcc(monkeypatch, fake_nvcc(tmp_path, "13.0"))
    build.cache_folder().mkdir(parents=True)
    build.folder_of((13, 0)).symlink_to("/proc")
    assert "cannot be built or loaded" in (build.build_refusal(DEQUANTISE, DEFINES) or "")
    assert "cannot hold built kernels" in caplog.text and "set XDG_CACHE_HOME" in caplog.text


def test_doctor_says_which_kernels_run(install: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def found() -> dict[str, examinations.Finding]:
        forget()
        return {finding.subject: finding for finding in examinations.cuda()}

    without = found()
    assert without["nvcc"].state == without["kernels"].state == "note"
    assert "Triton-lang's run" in without["kernels"].text and "nvcc" in without["kernels"].advice
    put_library(install)
    assert found()["kernels"].state == "ok" and "1 libraries" in found()["kernels"].text
    assert not found()["nvcc"].advice  # nothing to install
    use_driver(monkeypatch, (12, 8))
    assert "the driver takes 12.8" in found()["kernels"].text
    use_nvcc(monkeypatch, fake_nvcc(tmp_path, "12.6"))
    assert found()["nvcc"].state == "ok" and "CUDA 12.6" in found()["nvcc"].text
    assert "nvcc builds those" in found()["kernels"].text
    use_nvcc(monkeypatch, fake_nvcc(tmp_path, "11.8"))
    assert "older than 12.4" in found()["nvcc"].text


def test_a_written_set_is_what_an_install_finds(
    install: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    nvcc = require_nvcc()
    monkeypatch.setattr(prebuilt, "FOLDER", install)
    monkeypatch.setenv("XDG_CACHE_HOME", str(install.parent / "cache"))
    with pytest.raises(ValueError, match="no such source"):
        write_prebuilt(install, ["sm90_nothing.cu"])
    assert write_prebuilt(install, [DEQUANTISE]) == 1
    forget()
    [library] = install.glob("*.so")
    assert prebuilt.toolkit_version() == toolkit.nvcc_version(nvcc) and prebuilt.count() == 1
    shutil.rmtree(build.cache_folder())
    use_nvcc(monkeypatch, None)
    loaded = build.load(DEQUANTISE, ())
    assert loaded._name == str(library)
    assert loaded.slipstream_error_text is not None  # stripping leaves what is called


def failing_nvcc(folder: Path) -> Path:
    """It says its release, counts its calls in a file, and fails."""
    nvcc = folder / "nvcc"
    nvcc.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "Cuda compilation tools, release 13.0, V13.0.1" && exit 0\n'
        f'echo call >> {folder}/calls; echo "ptxas: out of memory" >&2; exit 1\n'
    )
    nvcc.chmod(0o755)
    return nvcc


def test_a_build_that_fails_is_a_reason_and_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_nvcc(monkeypatch, failing_nvcc(tmp_path))
    assert build.missing(DEQUANTISE, DEFINES) is None
    for _ in range(2):
        assert (
            build.build_refusal(DEQUANTISE, DEFINES) == f"{DEQUANTISE} cannot be built or loaded here; the log says why"
        )
    assert (tmp_path / "calls").read_text().splitlines() == ["call"]
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"{DEQUANTISE} NEVER_BUILT" in warning and "ptxas: out of memory" in warning and "takes its place" in warning


def test_a_library_that_cannot_be_loaded_is_a_reason(install: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = cache_library((13, 0), "no library").name
    assert build.missing(DEQUANTISE, DEFINES) is None
    assert "cannot be built or loaded" in (build.build_refusal(DEQUANTISE, DEFINES) or "")
    assert "cannot be loaded" in caplog.text and name in caplog.text


def build_ahead(monkeypatch: pytest.MonkeyPatch, jobs: str) -> None:
    monkeypatch.setattr(sys, "argv", ["build", "--jobs", jobs])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the module is imported already
        runpy.run_module("slipstream_kernels.cuda.build", run_name="__main__")


@pytest.mark.parametrize("jobs", ["0", "-1"])
def test_building_ahead_refuses_no_jobs(
    jobs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build_ahead(monkeypatch, jobs)
    assert f"--jobs: {jobs}, accepted: 1 or more" in capsys.readouterr().err


def test_building_ahead_says_why_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="nvcc: not on PATH"):
        build_ahead(monkeypatch, "1")
    use_nvcc(monkeypatch, fake_nvcc(tmp_path, "11.8"))
    with pytest.raises(SystemExit, match=r"is of CUDA 11\.8, older than 12\.4"):
        build_ahead(monkeypatch, "1")
