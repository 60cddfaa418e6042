"""Finds the gRPC address of the tritonserver that started this process, from its command line.

Triton does not pass its ports and addresses to Python models.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from slipstream.core.errors import ConfigError

DEFAULT_PORT = "8001"
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}
_OFF = ("0", "false", "off")


def own_grpc_url() -> str:
    """host:port of the parent's gRPC; Triton's default where the parent is no tritonserver.  Raises ConfigError."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text("utf-8", "replace").split("\0")
    except OSError:  # no /proc
        words = []
    return grpc_url_of(words if Path(words[0] if words else "").name == "tritonserver" else [])


def grpc_url_of(command: Sequence[str]) -> str:
    """host:port of the gRPC of a tritonserver with that command line.  Raises ConfigError when it has none."""
    if _option(command, "allow-grpc", "true").lower() in _OFF:
        raise ConfigError(
            "triton_url", "", "this server has no gRPC (--allow-grpc); accepted: host:port of one that has"
        )
    if _option(command, "grpc-use-ssl", "false").lower() not in _OFF:
        raise ConfigError("triton_url", "", "this server's gRPC wants TLS; accepted: host:port of a plain one")
    host = _option(command, "grpc-address", "0.0.0.0")
    host = _EVERYWHERE.get(host, host)
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{host}:{_option(command, 'grpc-port', DEFAULT_PORT)}"


def _option(command: Sequence[str], name: str, default: str) -> str:
    """The last value given, as `--name=value` or `--name value`."""
    value = default
    for word, following in zip(command, [*command[1:], ""]):
        if word == f"--{name}":
            value = following
        elif word.startswith(f"--{name}="):
            value = word.partition("=")[2]
    return value
