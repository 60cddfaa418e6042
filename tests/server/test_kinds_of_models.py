"""A model that is asked for what it does not do is told from one that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

openai = pytest.importorskip("openai")

MESSAGES = [{"role": "user", "content": "x"}]
ASKED: dict[str, Callable[[Any, str], object]] = {
    "chat": lambda client, name: client.chat.completions.create(model=name, messages=MESSAGES),
    "completion": lambda client, name: client.completions.create(model=name, prompt="x"),
    "embedding": lambda client, name: client.embeddings.create(model=name, input="x"),
}


@pytest.mark.parametrize(
    ("asked", "name", "words"),
    [
        ("chat", "encoder", "'encoder' gives embeddings and no text; models that write are: bare, blocking"),
        ("completion", "encoder", "'encoder' gives embeddings and no text; models that write are: bare, blocking"),
        ("embedding", "plain", "'plain' gives no embeddings; models that do are: batched_encoder, encoder"),
        ("embedding", "nowhere", "'nowhere' does not exist; there are: batched_encoder, encoder"),
        ("chat", "nowhere", "'nowhere' does not exist; there are: bare, blocking"),
    ],
)
def test_models_of_another_kind(fake_client: openai.OpenAI, asked: str, name: str, words: str) -> None:
    with pytest.raises(openai.NotFoundError, match=f"The model {words}") as refused:
        ASKED[asked](fake_client, name)
    assert refused.value.code == "model_not_found"
