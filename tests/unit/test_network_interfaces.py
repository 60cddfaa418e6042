"""The network interface that ranks of several nodes share."""

from __future__ import annotations

from pathlib import Path

import pytest
from slipstream.core.errors import EngineError
from slipstream.worker import process_group
from slipstream.worker.process_group import interface_of


def test_the_interface_of_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """IPv6 by the kernel's table, of which this is one with two interfaces."""
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe8000000000000000fc00fffe000001 04 40 20 80     eth0\n00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    monkeypatch.setattr(process_group, "IPV6_INTERFACES", table)
    assert interface_of("127.0.0.1") == interface_of("::ffff:127.0.0.1") == interface_of("::1") == "lo"
    assert interface_of("fe80::fc:ff:fe00:1%eth0") == "eth0"
    for address in ("fd00::7", "192.0.2.1"):
        with pytest.raises(EngineError, match=f"no network interface has the address {address}"):
            interface_of(address)
