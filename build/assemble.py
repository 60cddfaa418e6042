"""Make the install tree that tritonserver loads backends from, and a launcher for the server itself.

    .venv/bin/python build/assemble.py  # install/backends/*, install/tritonserver
    .venv/bin/python build/assemble.py --backends-dir /opt/tritonserver/backends  # in the container: our backend only

Runs with the interpreter that the engine process will use.  Repeating it costs a second; only what changed is compiled.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from compile_backend import compile_backend
from page_libraries import add_page_libraries
from slipstream.commands.server_tree import BACKEND, pytriton_folder, write_backend, write_server

ROOT = Path(__file__).resolve().parent.parent


def assemble(backends: Path, launcher: Path | None) -> None:
    """Fill `backends`; with a launcher path, also make the server of nvidia-pytriton startable (not in a container)."""
    folder = backends / BACKEND
    folder.mkdir(parents=True, exist_ok=True)
    compile_backend(folder)
    write_backend(folder)
    if why := add_page_libraries():
        print(f"the chat page will show answers as plain text: {why}", file=sys.stderr)
    if launcher is None:
        return
    triton = pytriton_folder()
    if triton is None:
        raise SystemExit(
            "no tritonserver here: pip install 'slipstream[server]', or give --backends-dir of an installed one"
        )
    write_server(launcher, triton, backends)
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
