"""The Dockerfile is not built here, which needs a Docker engine: what it names of the project must exist instead."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def instructions(root: Path) -> list[tuple[str, str]]:
    """(instruction, arguments), continuation lines joined."""
    lines = [line for line in (root / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines()]


def test_it_builds_on_the_official_image(instructions: list[tuple[str, str]]) -> None:
    images = [arguments for name, arguments in instructions if name == "FROM"]
    assert images == ["nvcr.io/nvidia/tritonserver:${TRITON_TAG}"]


def test_every_copied_path_is_in_the_repository(instructions: list[tuple[str, str]], root: Path) -> None:
    sources = [path for name, arguments in instructions if name == "COPY" for path in arguments.split()[:-1]]
    assert sources
    missing = [source for source in sources if not (root / source).exists()]
    assert not missing


def test_every_project_command_and_its_options_exist(instructions: list[tuple[str, str]], root: Path) -> None:
    commands = [part for name, line in instructions if name == "RUN" for part in re.split(r"&&", line)]
    scripts = [words[1:] for words in map(shlex.split, commands) if words[0].endswith("/python")]
    assert scripts, "nothing of the project is run"
    for script, *arguments in scripts:
        told = subprocess.run([sys.executable, script, "--help"], cwd=root, capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
        for option in (word for word in arguments if word.startswith("--")):
            assert option in told.stdout, f"{script} has no {option}"


def test_installed_files_are_all_copied(instructions: list[tuple[str, str]], root: Path) -> None:
    """pip install -c FILE -e . needs pyproject.toml, the packages it names, its readme and the constraints."""
    copied = {path for name, arguments in instructions if name == "COPY" for path in arguments.split()[:-1]}
    assert {"pyproject.toml", "constraints.txt", "README.md", "backend", "kernels", "build"} <= copied
    text = (root / "pyproject.toml").read_text()
    where = re.search(r"where = (\[.*\])", text)
    assert where is not None and set(json.loads(where.group(1))) <= copied


def test_the_model_repository_finds_its_checkpoint_in_the_image(
    instructions: list[tuple[str, str]], root: Path
) -> None:
    copies = [arguments.split() for name, arguments in instructions if name == "COPY"]
    assert ["model_repository", "model_repository"] in copies and ["models", "models"] in copies
    for config in root.glob("model_repository/*/config.pbtxt"):
        for path in re.findall(r'string_value: "(\.\./[^"]+)"', config.read_text()):
            assert (config.parent / path).is_dir(), f"{config}: {path}"
    command = next(arguments for name, arguments in instructions if name == "CMD")
    assert json.loads(command)[1] == "--model-repository=/opt/slipstream/model_repository"
