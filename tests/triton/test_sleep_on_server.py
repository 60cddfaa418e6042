"""Sleep, wake and reload in place through the real server, by one client of its HTTP endpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llm_client import http_generate
from llm_server import LlmServer
from safetensors.torch import load_file, save_file

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


def test_a_model_sleeps_wakes_and_reloads(llm_server: LlmServer, greedy: Callable[..., str], tmp_path: Path) -> None:
    server = llm_server
    changed_copy(server.checkpoint, tmp_path / "changed")
    parameters = {"enable_sleep_mode": "true", "reload_root": tmp_path, "drain_timeout_s": 5}
    others = {engine.pid for engine in server.engines()}
    with server.variant("sleeper", parameters) as name:
        (engine,) = (engine for engine in server.engines() if engine.pid not in others)

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
