"""TensorRT-LLM's prompt tuning tensors through the real server."""

from __future__ import annotations

from typing import Any

import numpy as np
from llm_client import Answer, grpc_infer
from llm_server import LlmServer
from safetensors.torch import load_file


def test_rows_of_the_model_s_own_table_say_what_its_tokens_say(llm_server: LlmServer) -> None:
    weights = load_file(llm_server.checkpoint / "model.safetensors")
    [table] = [tensor for name, tensor in weights.items() if name.endswith("embed_tokens.weight")]
    vocab_size, token_ids = len(table), [40, 41, 42, 43, 44, 45]

    def ask(ids: list[int], **inputs: Any) -> Answer:
        tensors: dict[str, Any] = {
            "input_ids": np.array(ids, np.int32),
            "max_tokens": 8,
            "temperature": 0.0,
            "stream": True,
            **inputs,
        }
        return grpc_infer(llm_server.grpc_url, "llm", tensors)

    rows = table[token_ids[:2]].half().numpy()
    given = {"prompt_embedding_table": rows, "prompt_vocab_size": np.array([2], np.int32)}
    found = ask([vocab_size, vocab_size + 1, *token_ids[2:]], **given)
    assert not found.error and found.text == ask(token_ids).text != ask(token_ids[2:]).text
    echoed = ask([vocab_size, vocab_size + 1, *token_ids[2:]], stream=False, **given)
    assert not echoed.error and echoed.text.endswith(found.text) and echoed.text != found.text
    refused = ask([vocab_size, *token_ids], prompt_embedding_table=rows[:, :-1])
    assert "prompt_embedding_table: got shape [2, " in refused.error
    assert f"token id {vocab_size} is not in the vocabulary" in ask([vocab_size]).error
