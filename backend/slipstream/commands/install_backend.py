"""Put the Triton backend of this wheel where a tritonserver looks for backends.

    slipstream install-backend --to /opt/tritonserver/backends

Then name it in a model's config.pbtxt, `backend: "slipstream"`, and start tritonserver as always. The backend starts
its engine in the Python environment that this command runs in. Run it again after an upgrade.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from slipstream.commands.server_tree import install_backend


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--to",
        type=Path,
        default=Path("/opt/tritonserver/backends"),
        metavar="DIR",
        help="tritonserver's folder of backends (%(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    print(f"installed: {install_backend(arguments.to.resolve())}")
    return 0
