"""What tritonserver needs of us on a machine: the backend's folder, and a launcher for the server of nvidia-pytriton.

The files point at this interpreter's environment, whose engine the server starts. Writing them again costs nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from slipstream.core.errors import ConfigError

BACKEND = "slipstream"
LIBRARY = "libtriton_slipstream.so"
PACKAGED_LIBRARY = Path(__file__).resolve().parents[1] / "native" / LIBRARY  # in a wheel


def write_if_changed(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file only if its contents change: a running server may be reading it."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    path.chmod(mode)


def write_backend(folder: Path) -> None:
    """Everything of a backend folder but the library."""
    write_contract(folder / "contract.json")
    write_engine_launcher(folder / "slipstream-engine")


def write_engine_launcher(path: Path) -> None:
    """Write the command that the C++ backend starts: the engine process, in this interpreter's environment.

    Nothing is imported from the server's current directory, which `python -m` would search first (and so would the
    Pythons that the engine starts: PYTHONSAFEPATH, of Python 3.11, is for those).
    """
    start = "import sys; sys.path[:] = filter(None, sys.path); from slipstream.engine.main import main; main()"
    lines = ["#!/bin/sh", "# Written by slipstream.", "PYTHONSAFEPATH=1", "export PYTHONSAFEPATH"]
    write_if_changed(path, "\n".join([*lines, f'exec "{sys.executable}" -c \'{start}\' "$@"', ""]), 0o755)


def write_contract(path: Path) -> None:
    """The inputs and outputs of each task, which the C++ backend splices into a model's config."""
    from slipstream.protocol.contract import declarations

    write_if_changed(path, json.dumps(declarations(), indent=1) + "\n")


def install_backend(backends: Path) -> Path:
    """Put the backend of this wheel into a server's backends folder. Returns its folder. Raises ConfigError."""
    if not PACKAGED_LIBRARY.is_file():
        why = "this is no wheel; in a source tree, build/assemble.py --backends-dir DIR compiles and installs it"
        raise ConfigError("install-backend", str(backends), why)
    folder = backends / BACKEND
    try:
        folder.mkdir(parents=True, exist_ok=True)
        copy = folder / LIBRARY
        if not copy.is_file() or copy.read_bytes() != PACKAGED_LIBRARY.read_bytes():
            made = folder / f".{LIBRARY}.new"
            shutil.copyfile(PACKAGED_LIBRARY, made)
            made.replace(copy)  # a running server keeps the old file mapped
        write_backend(folder)
    except OSError as error:
        raise ConfigError("install-backend", str(backends), f"cannot be written: {error.strerror or error}") from None
    return folder


# ------------------------------------------------------------ the server of nvidia-pytriton


def pytriton_folder() -> Path | None:
    """The tritonserver that `pip install 'slipstream[server]'` brings; None if it is not there."""
    spec = importlib.util.find_spec("pytriton")
    folder = Path(spec.origin).parent / "tritonserver" if spec is not None and spec.origin is not None else None
    return folder if folder is not None and (folder / "bin/tritonserver").is_file() else None


def write_server(launcher: Path, triton: Path, backends: Path) -> None:
    """Its launcher, and its Python backend beside ours."""
    _copy_python_backend(triton, backends / "python")
    _write_server_launcher(launcher, triton, backends)


def packaged_server() -> Path | None:
    """A launcher of that server with the backend of this wheel, below the user's cache; None without either."""
    triton = pytriton_folder()
    if triton is None or not PACKAGED_LIBRARY.is_file():
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    environment = sys.prefix.strip("/").replace("/", "-")  # the launchers name it
    tree = cache / "slipstream/server" / environment
    install_backend(tree / "backends")
    write_server(tree / "tritonserver", triton, tree / "backends")
    return tree / "tritonserver"


def _copy_python_backend(triton: Path, target: Path) -> None:
    """The Python backend with the stub for this interpreter, where the server looks for backends."""
    target.mkdir(parents=True, exist_ok=True)
    stub = f"python_backend_stubs/{sys.version_info.major}.{sys.version_info.minor}/triton_python_backend_stub"
    sources = [path for path in (triton / "backends/python").iterdir() if path.is_file()]
    for source in [*sources, triton / stub]:
        copy = target / source.name
        if not copy.exists() or copy.stat().st_mtime < source.stat().st_mtime:
            shutil.copy2(source, copy)


def _write_server_launcher(path: Path, triton: Path, backends: Path) -> None:
    """A `tritonserver` that finds our backends. The copied Python stub has lost its rpath, hence LD_LIBRARY_PATH."""
    libraries = [str(triton.parents[1] / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
    search = ":".join(folder for folder in libraries if folder and Path(folder).is_dir())
    text = (
        "#!/bin/sh\n# Written by slipstream: the tritonserver of nvidia-pytriton with these backends.\n"
        f'LD_LIBRARY_PATH="{search}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"\nexport LD_LIBRARY_PATH\n'
        # Python models run in the environment of the first python3 in PATH
        f'PATH="{Path(sys.prefix) / "bin"}:$PATH"\nexport PATH\n'
        f'exec "{triton / "bin/tritonserver"}" --backend-directory="{backends}" "$@"\n'
    )
    write_if_changed(path, text, 0o755)
