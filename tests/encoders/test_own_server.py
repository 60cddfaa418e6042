"""The address of the server that `guarded` runs on: read from its command line, or given."""

from __future__ import annotations

import pytest
from slipstream.core.errors import ConfigError
from slipstream.encoders.guard_settings import read_settings
from slipstream.encoders.own_server import grpc_url_of, own_grpc_url
from slipstream.encoders.parameters import Parameters


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ("", "127.0.0.1:8001"),
        ("--grpc-port=9001", "127.0.0.1:9001"),
        ("--grpc-port 9001 --grpc-address 10.0.0.7 --allow-grpc true", "10.0.0.7:9001"),
        ("--grpc-port=1 --grpc-address=:: --grpc-port=2", "[::1]:2"),
        ("--grpc-address=::1", "[::1]:8001"),
        ("--grpc-address=[fd00::7] --grpc-port=9001", "[fd00::7]:9001"),
        ("--http-port=5 --grpc-address=0.0.0.0 --grpc-use-ssl=false", "127.0.0.1:8001"),
    ],
)
def test_the_own_servers_address_is_read_from_its_command_line(options: str, url: str) -> None:
    assert grpc_url_of(["tritonserver", *options.split()]) == url


@pytest.mark.parametrize("option", ["--allow-grpc=false", "--allow-grpc=0", "--grpc-use-ssl=true"])
def test_a_server_without_plain_grpc_fails_the_load_by_name(option: str) -> None:
    with pytest.raises(ConfigError, match="triton_url"):
        grpc_url_of(["tritonserver", option])


def test_elsewhere_it_is_tritons_default() -> None:
    assert own_grpc_url() == read_settings(Parameters({})).triton_url == "127.0.0.1:8001"


@pytest.mark.parametrize("url", ["localhost", "http://localhost:8001", "::1:8001", "a b:1", ":8001", "host:"])
def test_a_bad_address_fails_the_load_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match=r"triton_url='.*': accepted: host:port"):
        read_settings(Parameters({"triton_url": url}))
    assert read_settings(Parameters({"triton_url": "[::1]:8001"})).triton_url == "[::1]:8001"


def test_a_bad_address_of_the_own_server_fails_the_load_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.encoders.guard_settings.own_grpc_url", lambda: "a b:8001")
    with pytest.raises(ConfigError, match="triton_url='a b:8001': accepted: host:port"):
        read_settings(Parameters({}))
