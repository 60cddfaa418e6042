"""The Dockerfile is not built here, which needs a Docker engine: what it names of the project must exist instead."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from slipstream.commands import serve

Instructions = list[tuple[str, str]]


@pytest.fixture(scope="module")
def instructions(root: Path) -> Instructions:
    """(instruction, arguments), continuation lines joined."""
    lines = [line for line in (root / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines()]


def arguments_of(instructions: Instructions, wanted: str) -> list[str]:
    return [arguments for name, arguments in instructions if name == wanted]


def commands_of(instructions: Instructions) -> list[list[str]]:
    """The words of every command of every RUN."""
    return [shlex.split(part) for line in arguments_of(instructions, "RUN") for part in line.split("&&")]


def test_it_builds_on_the_official_image(instructions: Instructions) -> None:
    assert arguments_of(instructions, "FROM") == ["nvcr.io/nvidia/tritonserver:${TRITON_TAG}"]


def test_every_copied_path_is_in_the_repository_and_not_ignored(instructions: Instructions, root: Path) -> None:
    sources = [path for arguments in arguments_of(instructions, "COPY") for path in arguments.split()[:-1]]
    assert sources
    assert not [source for source in sources if not (root / source).exists()]
    ignored = {line for line in (root / ".dockerignore").read_text().splitlines() if not line.startswith("#")}
    assert not ignored & set(sources) and {".git", ".venv", "install"} <= ignored


def test_every_line_is_a_shell_command(instructions: Instructions) -> None:
    for line in arguments_of(instructions, "RUN"):
        assert subprocess.run(["bash", "-n", "-c", line], capture_output=True).returncode == 0, line


def test_every_project_command_and_its_options_exist(instructions: Instructions, root: Path) -> None:
    runs = [words[1:] for words in commands_of(instructions) if words[0] in ("python", "python3")]
    scripts = [words for words in runs if words[0] != "-m"]
    assert [script for script, *_ in scripts] == ["build/assemble.py"]
    for script, *arguments in scripts:
        told = subprocess.run([sys.executable, script, "--help"], cwd=root, capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
        for option in (word for word in arguments if word.startswith("--")):
            assert option in told.stdout, f"{script} has no {option}"
    modules = {words[1] for words in runs if words[0] == "-m"}
    assert modules == {"venv", "slipstream_kernels.cuda.cutlass", "slipstream_kernels.cuda.build"}
    for module in modules:
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        if module != "venv":
            assert '__name__ == "__main__"' in Path(spec.origin).read_text(), f"{module} does nothing when run"


def test_installed_files_are_all_copied(instructions: Instructions, root: Path) -> None:
    """pip install -c FILE -e . needs pyproject.toml, the packages it names, its readme and the constraints."""
    copied = {path for arguments in arguments_of(instructions, "COPY") for path in arguments.split()[:-1]}
    assert {"pyproject.toml", "constraints.txt", "README.md", "backend", "kernels", "build"} <= copied
    text = (root / "pyproject.toml").read_text()
    where = re.search(r"where = (\[.*\])", text)
    assert where is not None and set(json.loads(where.group(1))) <= copied


def test_extras_and_the_default_encoder_are_those_of_the_project(instructions: Instructions, root: Path) -> None:
    text, makefile = (root / "pyproject.toml").read_text(), (root / "Makefile").read_text()
    [default] = [line.split("=")[1] for line in arguments_of(instructions, "ARG") if line.startswith("EXTRAS=")]
    for extra in (*default.split(","), "encoders"):
        assert re.search(rf"^{extra} = \[", text, re.M), f"pyproject.toml has no extra {extra}"
    encoder = re.search(r"--no-deps -c constraints.txt (\S+) ;;", " ".join(arguments_of(instructions, "RUN")))
    assert encoder is not None and encoder.group(1) in makefile
    assert f"{encoder.group(1)}==" in (root / "constraints.txt").read_text()


def test_the_environment_is_first_in_path(instructions: Instructions) -> None:
    """Its pip and python are the ones that later commands name, and the one of Triton's Python backend."""
    [folder] = arguments_of(instructions, "WORKDIR")
    assert arguments_of(instructions, "ENV") == [f"PATH={folder}/.venv/bin:$PATH"]
    names = [name for name, arguments in instructions]
    assert (
        names.index("WORKDIR")
        < names.index("ENV")
        < next(
            number
            for number, (name, arguments) in enumerate(instructions)
            if name == "RUN" and "-m venv .venv" in arguments
        )
    )


def test_the_model_repository_finds_its_checkpoint_in_the_image(instructions: Instructions, root: Path) -> None:
    copies = [arguments.split() for arguments in arguments_of(instructions, "COPY")]
    assert ["model_repository", "model_repository"] in copies and ["models", "models"] in copies
    for config in root.glob("model_repository/*/config.pbtxt"):
        for path in re.findall(r'string_value: "(\.\./[^"]+)"', config.read_text()):
            assert (config.parent / path).is_dir(), f"{config}: {path}"
    [folder], [command] = arguments_of(instructions, "WORKDIR"), arguments_of(instructions, "CMD")
    server, repository, *options = json.loads(command)
    assert (server, repository) == ("tritonserver", f"--model-repository={folder}/model_repository")
    loaded = [option.split("=")[1] for option in options if option.startswith("--load-model=")]
    needed = serve.exit_timeout_s(root / "model_repository")
    assert f"--exit-timeout-secs={needed}" in options and f"-t {needed + 5}" in (root / "Dockerfile").read_text()
    assert loaded and all((root / "model_repository" / name / "config.pbtxt").exists() for name in loaded)
