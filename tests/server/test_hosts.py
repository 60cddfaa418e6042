"""The Host check: a web page whose name was made to resolve to this machine (DNS rebinding) gets nothing."""

from __future__ import annotations

import http.client
import json

import pytest
from fake_triton import FakeTriton
from gateway import GatewayProcess
from slipstream.core.errors import ConfigError
from slipstream.server.errors import ApiError
from slipstream.server.hosts import HostRule


def get(gateway: GatewayProcess, host: str | None, path: str = "/") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
    try:
        connection.putrequest("GET", path, skip_host=True)
        if host is not None:
            connection.putheader("Host", host)
        connection.endheaders()
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/", "/v1/models", "/metrics"])
def test_a_rebound_name_gets_nothing(gateway: GatewayProcess, path: str) -> None:
    for host in (f"localhost:{gateway.port}", f"127.0.0.1:{gateway.port}", "[::1]:1", "192.0.2.7", "a.localhost"):
        assert get(gateway, host, path)[0] == 200, host
    status, body = get(gateway, f"rebound.example:{gateway.port}", path)
    error = json.loads(body)["error"]
    assert status == 421 and error["code"] == "host_not_allowed" and "--allowed-host" in error["message"]
    assert get(gateway, None, path)[0] == 400, "HTTP/1.1 without a Host"


def test_names_of_a_proxy(fake_triton: FakeTriton) -> None:
    allowed = ["--allowed-host", "Api.Example.com", "--allowed-host", "*.internal", "--no-page"]
    with GatewayProcess(fake_triton.url, allowed) as running:
        for host in ("api.example.com", "API.example.com:443", "api.example.com.", "a.b.internal"):
            assert get(running, host, "/health")[0] == 200, host
        for host in ("example.com", "xapi.example.com", "internal", "evil-internal", "api.example.com.evil.example"):
            assert get(running, host, "/health")[0] == 421, host


@pytest.mark.parametrize("hosts", [[], [b"localhost", b"evil.example"], [b"localhost", b"localhost"]])
def test_one_host_and_no_other(hosts: list[bytes]) -> None:
    with pytest.raises(ApiError) as error:
        HostRule("127.0.0.1", ()).check(hosts, "1.1")
    assert error.value.status_code == 400


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil@localhost", "localhost/", "localhost:x", "127.0.0.1.evil.io"]
)
def test_hosts_that_only_look_right(host: str) -> None:
    with pytest.raises(ApiError) as error:
        HostRule("0.0.0.0", ()).check([host.encode()], "1.1")
    assert error.value.status_code == 421


def test_what_is_bound_and_what_is_switched_off() -> None:
    HostRule("gateway.lan", ()).check([b"gateway.lan:9000"], "1.1")
    HostRule("127.0.0.1", ()).check([], "1.0")
    for hosts in ([b"anything.example"], [], [b"a", b"b"]):
        HostRule("127.0.0.1", ("*",)).check(hosts, "1.1")


@pytest.mark.parametrize("name", ["http://a", "a:9000", "a/b", "", "*a", "a b"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_host"):
        HostRule("127.0.0.1", (name,))


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_what_other_origins_may_send_without_asking_is_refused(
    gateway: GatewayProcess, content_type: str | None
) -> None:
    """A page of another origin can post only these types without a preflight request, which CORS then denies it."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
    headers = {"Origin": "https://evil.example"} | ({"Content-Type": content_type} if content_type else {})
    body = json.dumps({"model": "llm", "prompt": "x", "max_tokens": 1})
    connection.request("POST", "/v1/completions", body, headers)
    reply = connection.getresponse()
    assert reply.status == 400 and reply.getheader("access-control-allow-origin") is None
    connection.close()
