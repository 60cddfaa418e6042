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
from slipstream.cli import build_parser
from slipstream.commands import serve
from slipstream.nn.gguf import convert

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
    assert modules == {"venv", "compileall", "slipstream_kernels.cuda.cutlass", "slipstream_kernels.cuda.build"}
    for module in modules:
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        if module.startswith("slipstream"):
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


def test_the_modules_are_compiled_where_the_user_may_not_write(instructions: Instructions, root: Path) -> None:
    """All packages that are installed from their sources."""
    where = re.search(r"where = (\[.*\])", (root / "pyproject.toml").read_text())
    assert where is not None
    assert ["python", "-m", "compileall", "-q", *json.loads(where.group(1))] in commands_of(instructions)


def test_the_environment_is_first_in_path(instructions: Instructions) -> None:
    """Its pip and python are the ones that later commands name, and the one of Triton's Python backend."""
    [folder] = arguments_of(instructions, "WORKDIR")
    assert arguments_of(instructions, "ENV")[0] == f"PATH={folder}/.venv/bin:$PATH"
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


def test_the_command_starts_server_and_gateway_for_clients_outside(instructions: Instructions, root: Path) -> None:
    [command] = arguments_of(instructions, "CMD")
    program, *arguments = json.loads(command)
    assert program == "slipstream"
    given = build_parser().parse_args(arguments)
    assert (given.command, given.host, given.openai_port) == ("serve", "0.0.0.0", 9000)
    repository = root / "model_repository"
    started = serve.server_command(Path("/opt/tritonserver/bin/tritonserver"), repository, given)
    loaded = [option.split("=")[1] for option in started if option.startswith("--load-model=")]
    assert loaded and all((repository / name / "config.pbtxt").exists() for name in loaded)
    needed = serve.exit_timeout_s(repository)
    assert f"--exit-timeout-secs={needed}" in started and f"-t {needed + 5}" in (root / "Dockerfile").read_text()
    exposed = {int(port) for line in arguments_of(instructions, "EXPOSE") for port in line.split()}
    assert exposed == {given.http_port, given.grpc_port, given.metrics_port, given.openai_port}


def test_it_runs_as_a_user_that_can_read_the_kernels_and_write_its_home(instructions: Instructions) -> None:
    names = [name for name, arguments in instructions]
    environment = dict(line.split("=", 1) for line in arguments_of(instructions, "ENV"))
    [user], [folder] = arguments_of(instructions, "USER"), arguments_of(instructions, "WORKDIR")
    assert all(int(number) > 0 for number in user.split(":"))
    assert names.index("USER") > max(index for index, name in enumerate(names) if name in ("RUN", "COPY"))
    cache = environment["XDG_CACHE_HOME"]
    assert cache.startswith(f"{folder}/") and not environment["HOME"].startswith("/root")
    runs = [(name, arguments) for name, arguments in instructions if name in ("ENV", "RUN")]
    where = next(index for index, (name, arguments) in enumerate(runs) if arguments.startswith("XDG_CACHE_HOME="))
    built = next(index for index, (name, arguments) in enumerate(runs) if "slipstream_kernels.cuda.build" in arguments)
    assert where < built, "the kernels are built into another cache"
    assert "chmod 1777 $HOME" in " ".join(" ".join(words) for words in commands_of(instructions))


def test_the_cache_of_converted_files_may_be_a_link_to_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the image, where the rest of the cache is read-only."""
    cache, home = tmp_path / "cache/slipstream", tmp_path / "home"
    cache.mkdir(parents=True)
    home.mkdir()
    (cache / "gguf").symlink_to(home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "m.gguf"
    file.touch()
    monkeypatch.setattr(convert, "convert", lambda source, folder: folder.mkdir())
    assert convert.converted(file).resolve().parent == home
