"""Checks Host headers against DNS rebinding. No state; any thread.

If evil.example is made to resolve to this machine, a browser takes its pages and the gateway as one origin: CORS does
not help, but requests have `Host: evil.example`. Addresses cannot be rebound and need no check.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from slipstream.core.errors import ConfigError
from slipstream.server.errors import ApiError

ANY = "*"
_WILDCARDS = ("", "0.0.0.0", "::", "*")
_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.%]+\]|[^:\[\]]+)(:\d{1,5})?")


class HostRule:
    """bound: the address or name that the gateway listens on. allowed: further names, `*.name`, or `*` for any."""

    def __init__(self, bound: str, allowed: tuple[str, ...]) -> None:
        own = socket.gethostname() if bound in _WILDCARDS else bound
        names = [name.lower().rstrip(".") for name in allowed]
        for name in names:
            if name != ANY and not _NAME.fullmatch(name):
                raise ConfigError("allowed_host", name, "accepted: a name without scheme and port, *.name, or *")
        self._is_off = ANY in names
        self._names = frozenset(["localhost", own.lower(), *(name for name in names if not name.startswith("*."))])
        self._endings = (".localhost", *(name[1:] for name in names if name.startswith("*.")))

    def check(self, hosts: list[bytes], http_version: str) -> None:
        """hosts: the Host headers of a request. Raises ApiError: 421 for an unknown name, 400 for none or several."""
        if self._is_off or (not hosts and http_version == "1.0"):
            return
        if len(hosts) != 1:
            raise ApiError(400, f"The request has {len(hosts)} Host headers, accepted: one", code="invalid_host")
        text = hosts[0].decode("latin-1").strip().lower()
        found = _HOST.fullmatch(text)
        name = found["name"].rstrip(".") if found else ""
        if not name or not (name in self._names or name.endswith(self._endings) or _is_address(name)):
            shown = text if len(text) <= 100 else text[:97] + "..."
            accepted = "accepted: addresses, localhost, and names given by --allowed-host"
            raise ApiError(421, f"The gateway is not called {shown!r}, {accepted}", code="host_not_allowed")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
