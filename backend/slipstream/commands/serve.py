"""Start tritonserver, with a model repository or with one checkpoint.

    slipstream serve --model-repository model_repository
    slipstream serve --model /models/Llama-3.1-8B-Instruct --set max_num_seqs=128 --openai-port 9000
    slipstream serve model_repository/llm

--model writes a repository of one model, `llm`, for the time that the server runs; --set gives it parameters of
docs/configuration.md. --openai-port also starts the OpenAI gateway and the chat page, once the models are ready; there
the model has its own name, too.
What follows a lone -- goes to tritonserver as it is. Ctrl-C drains and stops everything; a second one ends it at once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from slipstream.commands import served_folder, server_tree
from slipstream.commands.serve_openai import add_passed_on, passed_on
from slipstream.core.config import ServingConfig
from slipstream.core.config_parse import parse_parameters, with_whole_paths
from slipstream.core.errors import ConfigError

SOURCE_TREE = Path(__file__).resolve().parents[3]
# of this tree's repository; its encoder models load when they are named, as their weights are a package of their own
OWN_MODELS = ("llm", "preprocessing", "postprocessing", "ensemble")
CONTAINER = Path("/opt/tritonserver/bin/tritonserver")
EXIT_TIMEOUT = "--exit-timeout-secs"
GPU_DRIVER = Path("/dev/nvidiactl")
_NO_GPU = ("--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0")  # else the server's log begins with errors
LAST_WORDS_S = 3.0  # time for the server to answer its clients after a second Ctrl-C


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model-repository", type=Path, metavar="DIR", help="folders of models, each with config.pbtxt")
    what.add_argument("--model", metavar="FOLDER_OR_ID", help="a checkpoint folder, or a Hugging Face id")
    parser.add_argument(
        "--load", action="append", default=[], metavar="MODEL", help="load only this model (repeatable); default: all"
    )
    add_common_arguments(parser)
    parser.add_argument(
        "--tritonserver", type=Path, metavar="FILE", help="the server to start, if it is not found by itself"
    )
    told = "a checkpoint or hub id, a model's folder, or a repository; behind -- further arguments of tritonserver"
    parser.add_argument("server_arguments", nargs="*", metavar="FOLDER_OR_ID -- ARGUMENT", help=told)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `slipstream serve` and `make serve`."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter for --model (repeatable)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 listens on every interface (%(default)s)")
    parser.add_argument("--http-port", type=int, default=8000, help="(%(default)s)")
    parser.add_argument("--grpc-port", type=int, default=8001, help="(%(default)s)")
    parser.add_argument("--metrics-port", type=int, default=8002, help="(%(default)s)")
    parser.add_argument("--openai-port", type=int, metavar="PORT", help="start the OpenAI gateway there as well")
    gateway = parser.add_argument_group("with --openai-port")
    add_passed_on(gateway, gateway)


def check_common_arguments(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for an option of a gateway that is not started."""
    given = passed_on(arguments)
    if given and arguments.openai_port is None:
        raise ConfigError(given[0], given[1], "needs --openai-port, which starts the gateway")


def own_name(model: str) -> str:
    """What clients of OpenAI's API may call a checkpoint: its folder's name, its file's without `.gguf`, its hub id."""
    path = Path(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def settings_of(arguments: argparse.Namespace) -> dict[str, str]:
    """The parameters of --set. Raises ConfigError for one that is not NAME=VALUE."""
    settings = {}
    for text in arguments.set:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigError("--set", text, "accepted: NAME=VALUE with a name of docs/configuration.md")
        settings[name] = value
    return settings


def find_tritonserver() -> tuple[Path | None, str]:
    """(the server, where it was found), or (None, where it was looked for)."""
    launcher = SOURCE_TREE / "install/tritonserver"
    if launcher.is_file():
        return launcher, "the install tree that `make assemble` made"
    if packaged := server_tree.packaged_server():
        return packaged, "the server of nvidia-pytriton with this wheel's backend"
    on_path = shutil.which("tritonserver")
    if on_path:
        return Path(on_path), "PATH"
    if CONTAINER.is_file():
        return CONTAINER, "the official container's place"
    return None, f"neither {launcher} (make assemble) nor in PATH nor {CONTAINER}"


def write_repository(folder: Path, model: str, settings: Mapping[str, str]) -> Path:
    """A repository of one model, `llm`, with paths that count from the current directory.

    Raises ConfigError for a checkpoint that is not there and a wrong setting.
    """
    from slipstream.nn.checkpoint_path import resolve_checkpoint

    parameters = {"model": str(resolve_checkpoint(model).resolve()), **with_whole_paths(settings, Path.cwd())}
    (folder / "llm/1").mkdir(parents=True)
    parse_parameters(parameters, folder / "llm")  # a wrong one is said at once, not behind a hundred lines of a server
    texts = {key: json.dumps(value, ensure_ascii=False) for key, value in parameters.items()}  # quotes are escaped
    lines = [f'parameters {{ key: "{key}" value {{ string_value: {text} }} }}' for key, text in texts.items()]
    (folder / "llm/config.pbtxt").write_text("\n".join(['name: "llm"', 'backend: "slipstream"', *lines]) + "\n")
    return folder


def server_command(server: Path, repository: Path, arguments: argparse.Namespace) -> list[str]:
    """Explicit mode with models loaded by name, so that readiness covers them (docs/operations.md)."""
    command = [str(server), f"--model-repository={repository}", "--model-control-mode=explicit"]
    if not _is_given(EXIT_TIMEOUT, arguments):
        command.append(f"{EXIT_TIMEOUT}={exit_timeout_s(repository)}")
    is_ours = repository.resolve() == (SOURCE_TREE / "model_repository").resolve()
    command += [f"--load-model={name}" for name in arguments.load or (OWN_MODELS if is_ours else ("*",))]
    if not GPU_DRIVER.exists():
        command += [option for option in _NO_GPU if not _is_given(option, arguments)]
    for name in ("http", "grpc", "metrics"):
        command += [f"--{name}-address={arguments.host}", f"--{name}-port={getattr(arguments, f'{name}_port')}"]
    return [*command, *arguments.server_arguments]


def _is_given(option: str, arguments: argparse.Namespace) -> bool:
    name = option.partition("=")[0]
    return any(argument.startswith(name) for argument in arguments.server_arguments)


def run(arguments: argparse.Namespace) -> int:
    served_folder.take_argument(arguments)
    server, place = (arguments.tritonserver, "--tritonserver") if arguments.tritonserver else find_tritonserver()
    if server is None:
        raise ConfigError("tritonserver", "", f"not found: {place}; `slipstream doctor` says more")
    if not server.is_file():
        raise ConfigError("--tritonserver", str(server), "no such file")
    if arguments.set and not arguments.model:
        raise ConfigError("--set", arguments.set[0], "needs --model; a repository has its parameters in config.pbtxt")
    check_common_arguments(arguments)
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        if arguments.model:
            served_folder.check_model(arguments.model)
            arguments.alias.append(f"{own_name(arguments.model)}=llm")
            arguments.load = arguments.load or ["llm"]  # by name, so that the server's last words say why it failed
            repository = write_repository(Path(folder), arguments.model, settings_of(arguments))
        else:
            repository = arguments.model_repository or SOURCE_TREE / "model_repository"
        served_folder.check_repository(repository, arguments.load)
        return supervise(server_command(server, repository, arguments), repository, arguments)


def exit_timeout_s(repository: Path) -> int:
    """The --exit-timeout-secs that these models need."""
    given = (drain_timeout_s(path.read_text("utf-8")) for path in repository.glob("*/config.pbtxt"))
    return ServingConfig(drain_timeout_s=max(given, default=ServingConfig().drain_timeout_s)).exit_timeout_s


def drain_timeout_s(config: str) -> float:
    """drain_timeout_s of a config.pbtxt; the load refuses values that are no numbers."""
    pattern = r'key\s*:\s*"drain_timeout_s"[\s,]*value\s*:?\s*\{\s*string_value\s*:\s*"\s*([0-9.eE+]+)\s*"'
    found = re.search(pattern, config)
    try:
        return float(found[1]) if found else ServingConfig().drain_timeout_s
    except ValueError:
        return ServingConfig().drain_timeout_s


def supervise(command: list[str], repository: Path, arguments: argparse.Namespace) -> int:
    """Run the server, then the gateway, until the server ends. Returns its exit status."""
    check_ports(arguments)
    print(" ".join(command), flush=True)
    if not GPU_DRIVER.exists():
        harmless = "`CudaDriverHelper has not been initialized` and `unable to create stream for ensemble`"
        print(f"no GPU here: the server's lines {harmless} are no errors", flush=True)
    server = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: server.send_signal(signal.SIGTERM))
    signal.signal(signal.SIGINT, InterruptHandler(server))
    gateway = None
    try:
        if wait_until_ready(server, arguments):
            print(ready_line(arguments), flush=True)
            if arguments.openai_port is not None:
                gateway = subprocess.Popen(gateway_command(repository, arguments))
        return server.wait()
    finally:
        if gateway is not None:
            gateway.send_signal(signal.SIGTERM)
            gateway.wait()


def check_ports(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for a port that another process has: the server would say so only after minutes of loading."""
    for name in ("http", "grpc", "metrics", "openai"):
        port = getattr(arguments, f"{name}_port", None)
        if port:
            with socket.socket(socket.AF_INET6 if ":" in arguments.host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((arguments.host, port))
                except OSError as error:
                    why = f"cannot listen on {arguments.host}:{port}: {(error.strerror or str(error)).lower()}"
                    raise ConfigError(f"--{name}-port", port, f"{why}; accepted: a free port") from None


def ready_line(arguments: argparse.Namespace) -> str:
    """What is served where; the gateway has a line of its own."""
    host, loaded = arguments.host, ", ".join(arguments.load) if arguments.load else "all models of the repository"
    http, metrics = f"http://{host}:{arguments.http_port}", f"http://{host}:{arguments.metrics_port}/metrics"
    return f"ready: {loaded}; HTTP {http}, gRPC {host}:{arguments.grpc_port}, metrics {metrics}"


class InterruptHandler:
    """The first Ctrl-C drains the server, the second ends it at once (tritonserver ignores a second one)."""

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        self._server = server
        self._num_calls = 0

    def __call__(self, *_: object) -> None:
        self._num_calls += 1
        if self._num_calls == 1:
            print("draining; Ctrl-C again ends at once", file=sys.stderr, flush=True)
            self._server.send_signal(signal.SIGTERM)  # a terminal tells the whole group, kill -INT only this process
        elif self._num_calls == 2:
            threading.Thread(target=end_at_once, args=(self._server,), daemon=True).start()


def end_at_once(server: subprocess.Popen[bytes]) -> None:
    """End the engines, so that their requests are answered with the reason, then kill the server."""
    for pid in children_of(server.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + LAST_WORDS_S
    while server.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    server.kill()


def children_of(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def wait_until_ready(server: subprocess.Popen[bytes], arguments: argparse.Namespace) -> bool:
    """False when the server ends before it is ready."""
    host = "127.0.0.1" if arguments.host == "0.0.0.0" else arguments.host
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://{host}:{arguments.http_port}/v2/health/ready", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    return False


def gateway_command(repository: Path, arguments: argparse.Namespace) -> list[str]:
    host = "127.0.0.1" if arguments.host == "0.0.0.0" else arguments.host
    # not `-m slipstream.cli`, which looks for modules in the current directory first
    start = "import sys; sys.path[:] = filter(None, sys.path); from slipstream.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "serve-openai", "--host", arguments.host]
    command += ["--triton", f"{host}:{arguments.grpc_port}", "--port", str(arguments.openai_port)]
    command += ["--model-repository", os.fspath(repository), *passed_on(arguments)]
    if (repository / "embedding/config.pbtxt").exists() and "embedding" in (arguments.load or ["embedding"]):
        command += ["--embedding-model", "embedding"]
    return [*command, "--metrics-url", f"http://{host}:{arguments.metrics_port}/metrics"]
