"""POST /tokenize and /detokenize, as vLLM's: token ids of a prompt or a chat, and text of token ids.

By the gateway's copy of the model's tokenizer, on a thread; Triton is asked only which models there are.
"""

from __future__ import annotations

import asyncio
from typing import Any

from slipstream.server.catalog import Model
from slipstream.server.chat import render
from slipstream.server.errors import ApiError
from slipstream.server.gateway import Gateway
from slipstream.server.schemas import MAX_TOKENIZED_CHARS, ChatRequest, DetokenizeRequest, TokenizeRequest
from slipstream.server.tools.select import plan_tools


async def tokenize(gateway: Gateway, request: TokenizeRequest) -> dict[str, Any]:
    model = await gateway.catalog.find(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "prompt: accepted: a prompt or messages, one of them", param="prompt")
    is_chat = request.prompt is None
    text = request.prompt if request.prompt is not None else _rendered(request, model)
    has_special = request.add_special_tokens if request.add_special_tokens is not None else not is_chat
    ids = await encode(model, text, has_special, "messages" if is_chat else "prompt")
    texts = await asyncio.to_thread(_texts, model, ids) if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": model.max_model_len or None, "tokens": ids, "token_strs": texts}


async def encode(model: Model, text: str, add_special_tokens: bool, param: str) -> list[int]:
    """Token ids of a text, on a thread. Raises ApiError (400) for a text that is too long."""
    if len(text) > MAX_TOKENIZED_CHARS:
        message = f"has {len(text)} characters, accepted: at most {MAX_TOKENIZED_CHARS}"
        raise ApiError(400, f"{param}: {message}", param=param)
    return await asyncio.to_thread(lambda: model.tokenizer.loaded().encode(text, add_special_tokens))


def _texts(model: Model, token_ids: list[int]) -> list[str]:
    return list(map(model.tokenizer.loaded().token_text, token_ids))


def _rendered(request: TokenizeRequest, model: Model) -> str:
    names = "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"
    shown = {name: getattr(request, name) for name in names}
    chat = ChatRequest(model=request.model, tool_choice="none" if request.tools else None, **shown)
    return render(chat, model, plan_tools(chat, model.tool_format))


async def detokenize(gateway: Gateway, request: DetokenizeRequest) -> dict[str, Any]:
    model = await gateway.catalog.find(request.model)
    return {"prompt": await asyncio.to_thread(_text, model, request.tokens)}


def _text(model: Model, token_ids: list[int]) -> str:
    tokenizer = model.tokenizer.loaded()
    if token_ids and max(token_ids) >= tokenizer.vocab_size:
        message = f"{max(token_ids)} is not in the vocabulary, accepted: 0 to {tokenizer.vocab_size - 1}"
        raise ApiError(400, f"tokens: token id {message}", param="tokens")
    return tokenizer.decode(token_ids, skip_special_tokens=False)
