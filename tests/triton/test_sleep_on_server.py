"""Sleep, wake and reload in place through the real server, by a client of its HTTP endpoint and by the gateway."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway import GatewayProcess
from llm_client import http_generate
from llm_server import LlmServer
from safetensors.torch import load_file, save_file
from triton_server import fetch

PROMPT = "def fibonacci(n):\n"
GREEDY = {"text_input": PROMPT, "exclude_input_in_output": True, "max_tokens": 24, "temperature": 0.0}


def changed_copy(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint with other weights of the same shapes."""
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = table.roll(1, 0).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def sleeper(llm_server: LlmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("reload")
    changed_copy(llm_server.checkpoint, root / "changed")
    parameters = {"enable_sleep_mode": "true", "reload_root": root, "drain_timeout_s": 5}
    with llm_server.variant("sleeper", parameters) as name:
        yield name


def test_a_model_sleeps_wakes_and_reloads(llm_server: LlmServer, greedy: Callable[..., str], sleeper: str) -> None:
    server, name = llm_server, sleeper
    engine = server.engines()[-1]

    def ask(**body: Any) -> tuple[int, Any]:
        return http_generate(server.http_url, name, body)

    def control(command: str, **settings: Any) -> Any:
        status, reply = ask(control=command, **settings)
        assert status == 200, reply
        return json.loads(reply["text_output"])

    assert ask(**GREEDY)[1]["text_output"] == greedy(PROMPT)
    awake_bytes = engine.memory_info().rss
    assert control("sleep", sleep_level=2)["is_sleeping"]
    assert engine.memory_info().rss < awake_bytes - server.checkpoint.joinpath("model.safetensors").stat().st_size
    status, refused = ask(**GREEDY)
    assert status != 200 and "sleeps" in refused["error"]
    assert ask(control="is_sleeping")[1]["text_output"].startswith('{"is_sleeping": true')
    server.wait_until(lambda: server.metric("slipstream_sleep_level", name) == 2, "the metric of a sleeping model")
    assert not control("wake_up")["is_sleeping"]
    assert ask(**GREEDY)[1]["text_output"] == greedy(PROMPT)

    status, refused = ask(control="reload_weights", reload_folder=str(server.checkpoint.parent))
    assert status != 200 and "reload_root" in refused["error"]
    control("reload_weights", reload_folder="changed", sleep_mode="abort")
    assert ask(**GREEDY)[1]["text_output"] != greedy(PROMPT)
    control("reload_weights", reload_folder=str(server.checkpoint))
    assert ask(**GREEDY)[1]["text_output"] == greedy(PROMPT)
    assert engine.is_running() and engine.pid in {one.pid for one in server.engines()}
    status, refused = http_generate(server.http_url, "llm", {"control": "sleep"})
    assert status != 200 and "enable_sleep_mode" in refused["error"]


def test_the_gateway_asks_for_its_admin_key(llm_server: LlmServer, sleeper: str, tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("sk-admin\n")
    (tmp_path / "keys").write_text("sk-client\n")
    keys = ["--admin-key-file", str(tmp_path / "admin"), "--api-key-file", str(tmp_path / "keys")]
    with GatewayProcess(llm_server.grpc_url, keys) as gateway:

        def call(method: str, path: str, key: str = "sk-admin") -> tuple[int, Any]:
            headers = {"Authorization": f"Bearer {key}"}
            status, body = fetch(urllib.request.Request(gateway.url + path, headers=headers, method=method))
            return status, json.loads(body)

        for key in ("", "sk-client", "sk-admin2"):
            assert call("POST", "/sleep", key)[0] == 401
        assert call("GET", "/v1/models")[0] == 401  # the admin's key is for nothing else
        assert sleeper in call("GET", "/ready")[1]["models"]
        assert call("POST", "/sleep?level=2")[1]["is_sleeping"] is True
        assert call("GET", f"/is_sleeping?model={sleeper}")[1]["is_sleeping"] is True
        assert sleeper not in call("GET", "/ready")[1]["models"]
        for query in ("sleep?level=7", "sleep?level=x", "sleep?mode=now", "reload_weights?folder=/etc"):
            param = query.partition("?")[2].partition("=")[0]  # the name that the caller wrote
            status, refused = call("POST", f"/{query}")
            assert (status, refused["error"]["param"]) == (400, param)
            assert refused["error"]["message"].startswith(f"{param}: ")
        assert call("POST", "/wake_up?model=nobody")[0] == 404
        assert call("POST", "/wake_up")[1]["is_sleeping"] is False
        assert sleeper in call("GET", "/ready")[1]["models"]
