"""Make the install tree that tritonserver loads backends from, and a launcher for the server itself.

    .venv/bin/python build/assemble.py  # install/backends/*, install/tritonserver
    .venv/bin/python build/assemble.py --backends-dir /opt/tritonserver/backends  # in the container: our backend only

Runs with the interpreter that the engine process will use.  Repeating it costs a second; only what changed is compiled.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from compile_backend import compile_backend
from page_libraries import add_page_libraries

ROOT = Path(__file__).resolve().parent.parent
BACKEND = "slipstream"


def write_if_changed(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file only if its contents change: a running server may be reading it."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    path.chmod(mode)


def write_engine_launcher(path: Path) -> None:
    """Write the command that the C++ backend starts: the engine process, in this interpreter's environment.

    Nothing is imported from the server's current directory, which `python -m` would search first (and so would the
    Pythons that the engine starts: PYTHONSAFEPATH, of Python 3.11, is for those).
    """
    start = "import sys; sys.path[:] = filter(None, sys.path); from slipstream.engine.main import main; main()"
    lines = ["#!/bin/sh", "# Written by build/assemble.py.", "PYTHONSAFEPATH=1", "export PYTHONSAFEPATH"]
    write_if_changed(path, "\n".join([*lines, f'exec "{sys.executable}" -c \'{start}\' "$@"', ""]), 0o755)


def write_contract(path: Path) -> None:
    """The inputs and outputs of each task, which the C++ backend splices into a model's config."""
    from slipstream.protocol.contract import declarations

    write_if_changed(path, json.dumps(declarations(), indent=1) + "\n")


def package_folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def copy_python_backend(triton: Path, target: Path) -> None:
    """The Python backend of nvidia-pytriton with the stub for this interpreter, where the server looks for backends."""
    target.mkdir(parents=True, exist_ok=True)
    stub = f"python_backend_stubs/{sys.version_info.major}.{sys.version_info.minor}/triton_python_backend_stub"
    sources = [path for path in (triton / "backends/python").iterdir() if path.is_file()]
    for source in [*sources, triton / stub]:
        copy = target / source.name
        if not copy.exists() or copy.stat().st_mtime < source.stat().st_mtime:
            shutil.copy2(source, copy)


def write_server_launcher(path: Path, triton: Path, backends: Path) -> None:
    """A `tritonserver` that finds our backends.  The copied Python stub has lost its rpath, hence LD_LIBRARY_PATH."""
    libraries = [str(triton.parents[1] / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
    search = ":".join(folder for folder in libraries if folder and Path(folder).is_dir())
    text = (
        "#!/bin/sh\n# Written by build/assemble.py: the tritonserver of nvidia-pytriton with this tree's backends.\n"
        f'LD_LIBRARY_PATH="{search}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"\nexport LD_LIBRARY_PATH\n'
        # Python models run in the environment of the first python3 in PATH
        f'PATH="{Path(sys.prefix) / "bin"}:$PATH"\nexport PATH\n'
        f'exec "{triton / "bin/tritonserver"}" --backend-directory="{backends}" "$@"\n'
    )
    write_if_changed(path, text, 0o755)


def assemble(backends: Path, launcher: Path | None) -> None:
    """Fill `backends`; with a launcher path, also make the server of nvidia-pytriton startable (not in a container)."""
    folder = backends / BACKEND
    folder.mkdir(parents=True, exist_ok=True)
    compile_backend(folder)
    write_contract(folder / "contract.json")
    write_engine_launcher(folder / "slipstream-engine")
    if why := add_page_libraries():
        print(f"the chat page will show answers as plain text: {why}", file=sys.stderr)
    if launcher is None:
        return
    pytriton = package_folder("pytriton")
    if pytriton is None:
        raise SystemExit(
            "no tritonserver here: pip install 'slipstream[server]', or give --backends-dir of an installed one"
        )
    copy_python_backend(pytriton / "tritonserver", backends / "python")
    write_server_launcher(launcher, pytriton / "tritonserver", backends)
    print(launcher)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends-dir", type=Path, help="backends folder of an installed tritonserver")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    try:
        if arguments.backends_dir is not None:
            assemble(arguments.backends_dir.resolve(), None)
        else:
            assemble(ROOT / "install/backends", ROOT / "install/tritonserver")
    except RuntimeError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
