"""A request without `model`, which vLLM's clients may send, is for the only model there is."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import toy_tokenizers
from fake_triton import FakeTriton
from gateway import GatewayProcess

openai = pytest.importorskip("openai")
SCRIPT = json.dumps({"pieces": ["Hel", "lo"]})


def checkpoint(folder: Path) -> dict[str, str]:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[-1].content }}"}))
    toy_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    return {"model": str(folder)}


def test_the_only_model_answers(tmp_path: Path) -> None:
    message = {"role": "user", "content": SCRIPT}
    with FakeTriton({"llm": checkpoint(tmp_path)}) as triton:
        aliases = ["--alias", "other=llm", "--embedding-model", "encoder"]
        with GatewayProcess(triton.url, aliases) as running:
            client = openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)

            def answer(path: str, **body: object) -> dict:
                return client.post(path, cast_to=dict, body=body)

            for model in ({}, {"model": None}, {"model": ""}):
                chat = answer("/v1/chat/completions", messages=[message], **model)
                assert (chat["model"], chat["choices"][0]["message"]["content"]) == ("llm", "Hello")
            assert answer("/v1/completions", prompt=SCRIPT)["model"] == "llm"
            assert answer("/v1/responses", input=SCRIPT)["model"] == "llm"
            assert answer("/v1/messages", messages=[message], max_tokens=9)["model"] == "llm"
            assert answer("/tokenize", prompt="ab")["count"] >= 1
            assert answer("/v1/embeddings", input="x")["model"] == "encoder"


def test_a_model_that_restarts_is_not_replaced_by_another(tmp_path: Path) -> None:
    with FakeTriton({"llm": checkpoint(tmp_path), "other": {}}) as triton, GatewayProcess(triton.url, []) as running:
        client = openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)

        def ask() -> object:
            return client.post("/v1/completions", cast_to=dict, body={"prompt": SCRIPT, "request_id": "mine"})

        def forget_models(*names: str) -> None:
            for name in names:
                del triton.models[name]
            time.sleep(0.3)  # as old as what clients ask for may be
            client.get("/v1/models", cast_to=dict)

        with pytest.raises(openai.BadRequestError, match="accepted: llm, other") as refused:
            ask()
        assert refused.value.response.headers["x-request-id"] == "mine"
        forget_models("llm")
        with pytest.raises(openai.BadRequestError, match="accepted: llm, other"):
            ask()
    with FakeTriton({"llm": checkpoint(tmp_path)}) as triton, GatewayProcess(triton.url, []) as running:
        client = openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)
        assert ask()
        forget_models("llm")
        with pytest.raises(openai.InternalServerError, match="'llm' is not ready"):
            ask()


def test_without_models_the_answer_may_be_another_one_later() -> None:
    with FakeTriton({}) as triton, GatewayProcess(triton.url, []) as running:
        client = openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)
        with pytest.raises(openai.InternalServerError, match="No model is ready") as refused:
            client.post("/v1/completions", cast_to=dict, body={"prompt": "x"})
        assert refused.value.status_code == 503
        with pytest.raises(openai.NotFoundError, match="no embeddings are served here"):
            client.post("/v1/embeddings", cast_to=dict, body={"input": "x"})


def test_several_models_are_named(fake_client: openai.OpenAI) -> None:
    for path, body, names in (
        ("/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "bare, blocking, "),
        ("/embeddings", {"input": "x"}, "batched_encoder, encoder"),
    ):
        with pytest.raises(openai.BadRequestError, match=f"model: is missing, accepted: {names}") as refused:
            fake_client.post(path, cast_to=dict, body=body)
        assert refused.value.param == "model"
