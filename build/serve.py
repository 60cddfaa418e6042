"""Run tritonserver on a model repository, from a terminal (`make serve`) or for the demo.

.venv/bin/python build/serve.py  # SmolLM2-135M-Instruct; ports 8000 (HTTP), 8001 (gRPC), 8002 (metrics)
.venv/bin/python build/serve.py --model /path/or/hub-id  # the same model_repository with another checkpoint
.venv/bin/python build/serve.py --model code  # the repository as it is: the small code model that it names
.venv/bin/python build/serve.py --speculate medusa  # a drafter of models/: medusa, mtp, eagle, draft_model; or ngram
.venv/bin/python build/serve.py --encoders  # also safety, quality, embedding and the guarded pipelines
.venv/bin/python build/serve.py --set max_num_seqs=8 --openai-port 9000  # and the other options of `slipstream serve`

`slipstream serve`, which starts the server for both, serves a checkpoint by itself: `llm` and nothing beside it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from chat_model import FOLDER, chat_model
from drafters import CHAT_DRAFTERS, CODE_DRAFTERS, drafter_parameters
from free_ports import free_ports
from slipstream.commands.serve import (
    OWN_MODELS,
    add_common_arguments,
    check_common_arguments,
    exit_timeout_s,
    own_name,
    server_command,
    settings_of,
    supervise,
)
from slipstream.commands.served_folder import check_model
from slipstream.core.config_parse import with_whole_paths
from slipstream.core.draft_methods import DRAFT_METHODS
from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.nn.checkpoint_path import resolve_checkpoint

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = ROOT / "install/tritonserver"
REPOSITORY = ROOT / "model_repository"
ENCODER_MODELS = (
    "safety",
    "quality",
    "embedding",
    "guarded",
    "guarded_ensemble",
)  # `make encoders` installs their weights
CODE_MODEL = "code"  # the one that model_repository names
CODE_PROMPT, TEXT_PROMPT = "def fibonacci(n):\\n", "Photosynthesis is the process by which"
CHECKPOINT_PARAMETERS = ("model", "tokenizer_dir")

_PARAMETER = r'parameters \{{ key: "{key}"\s+value \{{ string_value: "[^"]*" \}} \}}\n?'


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    http: int
    grpc: int
    metrics: int

    @property
    def http_url(self) -> str:
        return f"{self.host}:{self.http}"

    @property
    def grpc_url(self) -> str:
        return f"{self.host}:{self.grpc}"


def free_address(host: str = "127.0.0.1") -> Address:
    return Address(host, *free_ports(3, host))


@contextmanager
def running_server(repository: Path, address: Address, log_path: Path, timeout_s: float) -> Iterator[None]:
    """A server whose log goes to a file.  Raises SystemExit with the end of the log when it does not become ready."""
    ports = {"http_port": address.http, "grpc_port": address.grpc, "metrics_port": address.metrics}
    wanted = argparse.Namespace(host=address.host, **ports, load=OWN_MODELS, server_arguments=[])
    with log_path.open("wb") as log:
        command = server_command(LAUNCHER, repository, wanted)
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + timeout_s
        while not is_ready(address):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"tritonserver did not become ready:\n{complaints(log_path)}")
            time.sleep(0.1)
        yield
        if process.poll() is not None:
            raise SystemExit(f"tritonserver ended with {process.returncode}:\n{complaints(log_path)}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(exit_timeout_s(repository) + 5)
        except subprocess.TimeoutExpired:
            process.kill()


def complaints(log_path: Path) -> str:
    """The error lines of a server's log, or its end if there are none."""
    lines = log_path.read_text(errors="replace").splitlines()
    wrong = [line for line in lines if re.match(r"E\d|error|terminate", line)]
    return "\n".join(wrong[-40:] or lines[-20:])


def is_ready(address: Address) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address.http_url}/v2/health/ready", timeout=5) as reply:
            return reply.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def copied_repository(folder: Path) -> Path:
    """A copy of model_repository whose relative paths still lead to models/."""
    shutil.copytree(REPOSITORY, folder / "model_repository")
    (folder / "models").symlink_to(ROOT / "models")
    return folder / "model_repository"


def repository_for(model: str, folder: Path) -> Path:
    """A copy of model_repository whose language models have another checkpoint: a folder, or a hub id (downloaded here,
    and once). Encoders and the draft keep theirs; `llm` no longer names what drafts for the checkpoint it had.
    """
    try:
        check_model(model)
        named = str(resolve_checkpoint(model).resolve())
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    repository = copied_repository(folder)
    for path in (repository / name / "config.pbtxt" for name in OWN_MODELS):
        path.write_text(with_checkpoint(path.read_text(), named))
    return repository


def with_checkpoint(config: str, checkpoint: str) -> str:
    """A config.pbtxt with another checkpoint, and without the speculation methods that have checkpoints of their own:
    these were trained for, or share the tokenizer of, the checkpoint that the config named."""
    trained = [method for method in DRAFT_METHODS.values() if method.checkpoint]
    for key in (parameter.name for method in trained for parameter in method.parameters):
        config = re.sub(_PARAMETER.format(key=key), "", config)
    for key in CHECKPOINT_PARAMETERS:
        config = _with_value(config, key, lambda _: checkpoint)
    trained_names = {method.name for method in trained}
    return _with_value(config, "speculative_method", lambda methods: _without(methods, trained_names))


def _without(methods: str, names: set[str]) -> str:
    return ",".join(name for name in methods.split(",") if name.strip() not in names)


def _with_value(config: str, key: str, change: Callable[[str], str]) -> str:
    pattern = rf'(key: "{key}"\s+value \{{ string_value: ")([^"]*)'
    return re.sub(pattern, lambda match: match.group(1) + change(match.group(2)), config)


def default_model() -> str:
    """The folder of the chat model, or CODE_MODEL, and a line that says why, when it cannot be fetched."""
    try:
        return str(chat_model())
    except (OSError, SlipstreamError) as error:
        print(f"\n  No chat model: {error}\n  The small code model of the repository is served instead.", flush=True)
        return CODE_MODEL


def prepare_repository(model: str, scratch: Path, method: str = "", settings: Mapping[str, str] | None = None) -> Path:
    """The model repository to serve: a copy in `scratch`, but for the code model as it is.

    method: of speculation.  settings: further parameters of `llm`.

    Raises SystemExit if the repository has no drafter of that method for the model.
    """
    model = model or default_model()
    settings = settings or {}
    if model == CODE_MODEL and not (method or settings):
        return REPOSITORY
    repository = copied_repository(scratch) if model == CODE_MODEL else repository_for(model, scratch)
    try:
        drafter = drafter_parameters(method, drafters_of(model)) if method else {}
    except ValueError as error:
        raise SystemExit(str(error)) from None
    path = repository / "llm" / "config.pbtxt"
    path.write_text(with_parameters(path.read_text(), {**drafter, **settings}))
    return repository


def drafters_of(model: str) -> str:
    """Whose drafters of models/ a model has: "" for any but the code model and the chat model."""
    if model == CODE_MODEL:
        return CODE_DRAFTERS
    return CHAT_DRAFTERS if Path(model).resolve() == FOLDER.resolve() else ""


def with_parameters(config: str, parameters: Mapping[str, str]) -> str:
    """A config.pbtxt with these parameters, in place of those of the same names."""
    for key, value in parameters.items():
        config = re.sub(_PARAMETER.format(key=key), "", config).rstrip() + "\n"
        config += f'parameters {{ key: "{key}" value {{ string_value: {json.dumps(value, ensure_ascii=False)} }} }}\n'
    return config


def serves_code(repository: Path) -> bool:
    """Whether `llm` has the checkpoint that model_repository names."""
    return _checkpoint_line(repository) == _checkpoint_line(REPOSITORY)


def _checkpoint_line(repository: Path) -> str:
    found = re.search(_PARAMETER.format(key="model"), (repository / "llm" / "config.pbtxt").read_text())
    assert found is not None
    return found.group().strip()


def banner(address: Address, repository: Path) -> str:
    prompt = CODE_PROMPT if serves_code(repository) else TEXT_PROMPT
    metrics = f"http://{address.host}:{address.metrics}/metrics"
    gateway = f"--triton {address.grpc_url} --model-repository model_repository --metrics-url {metrics}"
    http = f"http://{address.http_url}"
    num_tokens = 64 if prompt == CODE_PROMPT else 25
    body = f"""'{{"text_input": "{prompt}", "max_tokens": {num_tokens}, "temperature": 0}}'"""
    talk = "python client_examples/chat.py --code" if prompt == CODE_PROMPT else "slipstream chat"
    streaming = body.replace("}'", ', "stream": true}\'')
    return f"""
  gRPC {address.grpc_url}   HTTP {http}   metrics {metrics}   (Ctrl-C stops)

  curl -s  {http}/v2/health/ready -o /dev/null -w '%{{http_code}}\\n'
  curl -s  {http}/v2/models/llm/generate -d {body}
  curl -sN {http}/v2/models/llm/generate_stream -d {streaming}
  .venv/bin/python client_examples/stream.py --url {address.grpc_url}
  .venv/bin/{talk} --url {address.grpc_url}
  .venv/bin/slipstream serve-openai {gateway}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="folder of a checkpoint, a Hugging Face id, or `code`")
    parser.add_argument("--speculate", default="", help="medusa, mtp, eagle, draft_model or ngram")
    parser.add_argument("--encoders", action="store_true", help="also load safety, quality, embedding and guarded")
    add_common_arguments(parser)
    arguments, extra = parser.parse_known_args()
    arguments.load = OWN_MODELS + (ENCODER_MODELS if arguments.encoders else ())
    arguments.server_arguments = extra
    address = Address(arguments.host, arguments.http_port, arguments.grpc_port, arguments.metrics_port)
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        try:
            check_common_arguments(arguments)
            settings = with_whole_paths(settings_of(arguments), Path.cwd())
        except ConfigError as error:
            raise SystemExit(str(error)) from None
        model = arguments.model or default_model()
        repository = prepare_repository(model, Path(folder), arguments.speculate, settings)
        if model != CODE_MODEL:
            arguments.alias.append(f"{own_name(model)}=llm")
        print(banner(address, repository), flush=True)
        return supervise(server_command(LAUNCHER, repository, arguments), repository, arguments)


if __name__ == "__main__":
    sys.exit(main())
