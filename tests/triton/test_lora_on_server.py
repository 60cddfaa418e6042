"""LoRA adapters through the real server: by vLLM's `lora_name`, by the gateway's model names, loaded while it runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway import GatewayProcess
from llm_client import Answer, grpc_infer, http_generate
from llm_server import LlmServer
from lora_adapters import as_sent, make_adapter

PROMPT = "def fibonacci(n):\n"
GREEDY = {"text_input": PROMPT, "exclude_input_in_output": True, "max_tokens": 16, "temperature": 0.0}


@pytest.fixture(scope="module")
def tuned(llm_server: LlmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """As vLLM's backend has it: multi_lora.json beside the configuration. A second adapter can be loaded later."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second")):
        make_adapter(root / name, llm_server.checkpoint, seed, rank=8, modules=("q_proj", "v_proj", "up_proj"))
    folder = llm_server.repository / "tuned"
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "1/multi_lora.json").write_text(json.dumps({"first": str(root / "first")}))
    with llm_server.variant(
        "tuned", {"enable_lora": "true", "max_loras": 2, "lora_root": root, "lora_cache_host_memory_bytes": 8 << 20}
    ) as name:
        yield name


def test_by_name_over_http_and_grpc(llm_server: LlmServer, greedy: Callable[..., str], tuned: str) -> None:
    def ask(**body: Any) -> tuple[int, Any]:
        return http_generate(llm_server.http_url, tuned, {**GREEDY, **body})

    assert ask()[1]["text_output"] == greedy(PROMPT, 16)
    status, reply = ask(lora_name="first")
    text = reply["text_output"]
    assert status == 200 and text != greedy(PROMPT, 16)
    streamed = grpc_infer(
        llm_server.grpc_url,
        tuned,
        {"text_input": PROMPT, "stream": True},
        parameters={"max_tokens": 16, "temperature": 0.0, "lora_name": "first"},
    )
    assert streamed.text == text
    in_json = ask(sampling_parameters=json.dumps({"lora_name": "first"}))
    assert in_json[1]["text_output"] == text
    status, reply = ask(lora_name="other")
    assert status == 400 and "LoRA 'other' is not supported, we currently support ['first']" in reply["error"]
    status, reply = ask(lora_path="first")
    assert status == 400 and "lora_path" in reply["error"]
    status, reply = http_generate(llm_server.http_url, "llm", {**GREEDY, "lora_name": "first"})
    assert status == 400 and "LoRA feature is not enabled" in reply["error"]


def test_weights_in_a_request(llm_server: LlmServer, tuned: str, tmp_path: Path) -> None:
    """TensorRT-LLM's way, here with what `first` has: the same text up to the rounding of its numbers to fp16."""
    folder = make_adapter(tmp_path / "sent", llm_server.checkpoint, 0, rank=8, modules=("q_proj", "v_proj", "up_proj"))
    weights, config = as_sent(folder)

    def ask(**inputs: Any) -> Answer:
        tensors = {"text_input": PROMPT, "max_tokens": 8, "temperature": 0.0, "stream": True, **inputs}
        return grpc_infer(llm_server.grpc_url, tuned, tensors)

    number = np.array([5], np.uint64)
    unknown = ask(lora_task_id=number)
    assert "lora_task_id: got 5, accepted: an adapter that is in the cache" in unknown.error
    first = ask(lora_task_id=number, lora_weights=weights, lora_config=config)
    assert not first.error, first.error
    assert first.text == ask(lora_task_id=number).text == ask(lora_name="first").text != ask().text
    refused = ask(lora_task_id=number, lora_weights=weights[:2], lora_config=config)
    assert "lora_weights: has 2 rows" in refused.error


def test_by_the_model_of_openai_s_api(
    llm_server: LlmServer, greedy: Callable[..., str], tuned: str, tmp_path: Path
) -> None:
    openai = pytest.importorskip("openai")
    (tmp_path / "admin").write_text("sk-admin\n")
    (tmp_path / "keys").write_text("sk-client\n")
    arguments = ["--metrics-url", llm_server.metrics_url, "--admin-key-file", str(tmp_path / "admin")]
    arguments += ["--api-key-file", str(tmp_path / "keys")]
    with GatewayProcess(llm_server.grpc_url, arguments) as gateway:
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="sk-client", max_retries=0, timeout=120)
        admin = client.with_options(default_headers={"Authorization": "Bearer sk-admin"})

        def text(model: str) -> str:
            return client.completions.create(model=model, prompt=PROMPT, max_tokens=16, temperature=0).choices[0].text

        cards = {card.id: card for card in client.models.list()}
        assert cards["first"].parent == tuned and "second" not in cards
        first = http_generate(llm_server.http_url, tuned, {**GREEDY, "lora_name": "first"})[1]["text_output"]
        assert text("first") == first != text(tuned) == greedy(PROMPT, 16)

        with pytest.raises(openai.AuthenticationError):
            client.post("/load_lora_adapter", body={"lora_name": "later", "lora_path": "second"}, cast_to=object)
        with pytest.raises(openai.BadRequestError, match="lora_root"):
            admin.post("/load_lora_adapter", body={"lora_name": "later", "lora_path": "/etc"}, cast_to=object)
        with pytest.raises(
            openai.BadRequestError, match=f"lora_name: {tuned!r} is the name of a model, .*: another name"
        ):
            admin.post("/load_lora_adapter", body={"lora_name": tuned, "lora_path": "second"}, cast_to=object)
        told = admin.post("/load_lora_adapter", body={"lora_name": "later", "lora_path": "second"}, cast_to=object)
        assert told == {"adapters": ["first", "later"]}
        assert text("later") not in (first, greedy(PROMPT, 16))
        admin.post("/unload_lora_adapter", body={"lora_name": "later"}, cast_to=object)
        with pytest.raises(openai.NotFoundError):
            text("later")
