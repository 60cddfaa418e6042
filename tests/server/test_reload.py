"""A model that is loaded with another checkpoint: the gateway has that one's template, tokenizer and limits."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import toy_tokenizers
from fake_triton import FakeTriton
from gateway import GatewayProcess
from llm_server import LlmServer
from patience import wait_until
from slipstream.server import catalog
from slipstream.server.catalog import Catalog, Model
from slipstream.server.options import GatewayOptions
from slipstream.server.triton import TritonLink
from tokenizers import Tokenizer


def checkpoint(folder: Path, mark: str, max_model_len: int, tokenizer: Callable[[], Tokenizer]) -> dict[str, str]:
    """The parameters of a model whose prompts begin with `mark`."""
    folder.mkdir(exist_ok=True)
    settings = {"chat_template": mark + "{{ messages[-1]['content'] }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": max_model_len}))
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": max_model_len // 2}))
    tokenizer().save(str(folder / "tokenizer.json"))
    return {"model": str(folder)}


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[dict[str, str]]:
    tokenizers = (toy_tokenizers.byte_level, toy_tokenizers.sentencepiece)
    marks = zip(("first", "second"), ("a: ", "b: "), (512, 64), tokenizers)
    return [checkpoint(tmp_path / name, *rest) for name, *rest in marks]


@pytest.fixture
def triton(checkpoints: list[dict[str, str]]) -> Iterator[FakeTriton]:
    with FakeTriton({"llm": checkpoints[0], "guarded": {"llm": "llm"}, "other": dict(checkpoints[0])}) as running:
        yield running


def shown(model: Model) -> tuple[str, list[int], int, int]:
    assert model.template is not None
    text = model.template.render([{"role": "user", "content": "Grüße"}])
    return text, list(model.tokenizer.loaded().encode(text, False)), model.max_model_len, model.default_max_tokens


def prompt_of(running: GatewayProcess, model: str) -> tuple[list[int], str]:
    """The prompt of a chat, in tokens and in their text."""

    def post(path: str, **body: object) -> dict[str, Any]:
        data = json.dumps({"model": model, **body}).encode()
        headers = {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(running.url + path, data, headers)) as reply:
            return json.load(reply)

    ids = post("/tokenize", messages=[{"role": "user", "content": "Grüße"}])["tokens"]
    return ids, post("/detokenize", tokens=ids)["prompt"]


@pytest.mark.parametrize("text", [b"{", b'"\xff"'])
def test_clients_are_not_told_where_files_lie(triton: FakeTriton, tmp_path: Path, text: bytes, caplog: Any) -> None:
    (tmp_path / "first/tokenizer_config.json").write_bytes(text)

    async def run() -> Model:
        link = TritonLink(triton.url)
        try:
            return await Catalog(GatewayOptions(), link).find("llm")
        finally:
            await link.close()

    model = asyncio.run(run())
    assert model.template is None and "its chat template cannot be read (internal error" in model.no_template
    assert str(tmp_path) not in model.no_template and f"{tmp_path}/first/tokenizer_config.json" in caplog.text


def test_a_model_loaded_anew_is_described_anew(
    triton: FakeTriton, checkpoints: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for its alias and the model that wraps it. A request under way keeps what it began with."""
    threads: list[threading.Thread] = []
    load_template = catalog.load_template

    def load(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return load_template(*arguments)

    async def run() -> None:
        link = TritonLink(triton.url)
        models = Catalog(GatewayOptions(aliases={"mine": "llm"}), link)

        async def find() -> dict[str, Model]:
            models.forget()
            return {name: await models.find(name) for name in ("llm", "mine", "guarded", "other")}

        before = await find()
        first, num_reads = shown(before["llm"]), len(threads)
        assert first[0] == "a: Grüße" and first[2:] == (512, 256) and shown(before["mine"]) == first
        unchanged = await find()
        assert all(unchanged[name] is model for name, model in before.items()), "tokenizers are loaded once"
        assert len(threads) == num_reads
        triton.models["llm"] = checkpoints[1]
        after = await find()
        second = shown(after["llm"])
        assert second[0] == "b: Grüße" and second[2:] == (64, 32) and second[1] != first[1]
        assert shown(after["mine"]) == second and shown(after["guarded"])[:3] == second[:3]
        assert after["other"] is before["other"] and shown(before["llm"]) == first
        checkpoint(Path(checkpoints[1]["model"]), "new: ", 128, toy_tokenizers.byte_level)  # written over
        assert shown((await find())["llm"])[::2] == ("new: Grüße", 128)
        triton.models["llm"] = {**checkpoints[1], "rope_scaling": '{"rope_type": "linear", "factor": 4}'}
        assert shown((await find())["llm"])[2] == 512
        triton.models["llm"] = {**checkpoints[1], "max_model_len": "100"}
        assert shown((await find())["llm"])[2] == 100
        await link.close()

    monkeypatch.setattr(catalog, "load_template", load)
    asyncio.run(run())
    assert threading.main_thread() not in threads, "streams would wait for the files"


def test_clients_see_the_model_that_was_loaded(triton: FakeTriton, checkpoints: list[dict[str, str]]) -> None:
    def look() -> tuple[Any, ...]:
        cards = {card["id"]: card["max_model_len"] for card in json.loads(running.get("/v1/models")[1])["data"]}
        return cards["llm"], *prompt_of(running, "llm")

    with GatewayProcess(triton.url, ["--log-level", "warning"]) as running:
        length, ids, text = look()
        assert (length, text) == (512, "a: Grüße")
        triton.models["llm"] = checkpoints[1]
        wait_until(lambda: look()[::2] == (64, "b: Grüße"), "the model that was loaded")
        assert look()[1] != ids


def test_the_real_server_loads_another_checkpoint(
    llm_server: LlmServer, gateway: GatewayProcess, demo_model: Path, tmp_path: Path
) -> None:
    """In place, without an unload: the model stays READY all the while."""
    shutil.copytree(demo_model, tmp_path / "other", symlinks=False)
    (tmp_path / "other/chat_template.jinja").write_text("OTHER {{ messages[-1]['content'] }}")

    def length() -> int:
        return json.loads(gateway.get("/v1/models/reloaded")[1])["max_model_len"]

    settings = {"load_format": "null", "num_blocks": 64}
    with llm_server.variant("reloaded", {**settings, "max_model_len": 256}, demo_model):
        assert length() == 256 and "OTHER" not in prompt_of(gateway, "reloaded")[1]
        llm_server.add_variant("reloaded", {**settings, "max_model_len": 128}, tmp_path / "other")
        assert llm_server.load("reloaded")[0] == 200
        wait_until(lambda: length() == 128, "the other's length")
        assert prompt_of(gateway, "reloaded")[1] == "OTHER Grüße"
