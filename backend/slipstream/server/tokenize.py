"""POST /tokenize and /detokenize, as vLLM's: token ids of a prompt or a chat, and text of token ids.

By the gateway's copy of the model's tokenizer, on threads of their own; Triton is asked only which models there are.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from slipstream.server.catalog import Model
from slipstream.server.chat import render
from slipstream.server.errors import ApiError
from slipstream.server.gateway import Gateway
from slipstream.server.schemas import MAX_TOKENIZED_CHARS, ChatRequest, DetokenizeRequest, TokenizeRequest
from slipstream.server.sse import to_json
from slipstream.server.tools.select import plan_tools

_PART = 4096  # entries of a list that are written at once, in less than a millisecond


async def tokenize(gateway: Gateway, request: TokenizeRequest, http: HttpRequest) -> Response:
    model = await gateway.catalog.find(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "prompt: accepted: a prompt or messages, one of them", param="prompt")
    is_chat, text = request.prompt is None, request.prompt
    if text is None:
        text = await gateway.plan(http, lambda: _rendered(request, model))
    has_special = request.add_special_tokens if request.add_special_tokens is not None else not is_chat
    _check_length(text, "messages" if is_chat else "prompt")

    def answer() -> dict[str, Any]:
        tokenizer = model.tokenizer.loaded()
        ids = tokenizer.encode(text, has_special)
        texts = list(map(tokenizer.token_text, ids)) if request.return_token_strs else None
        return {"count": len(ids), "max_model_len": model.max_model_len or None, "tokens": ids, "token_strs": texts}

    return await gateway.tokenizing.run(http.state.lease.owner, len(text), lambda: _response(answer()))


async def count(gateway: Gateway, model: Model, text: str, owner: bytes) -> int:
    """Tokens of a chat's text. Raises ApiError (400) for one that is too long."""
    _check_length(text, "messages")
    return await gateway.tokenizing.run(owner, len(text), lambda: len(model.tokenizer.loaded().encode(text, False)))


def _check_length(text: str, param: str) -> None:
    if len(text) > MAX_TOKENIZED_CHARS:
        message = f"has {len(text)} characters, accepted: at most {MAX_TOKENIZED_CHARS}"
        raise ApiError(400, f"{param}: {message}", param=param)


def _response(body: dict[str, Any]) -> Response:
    """Written on the thread, too, and lists in parts: the event loop's thread runs between them."""
    fields = (f"{to_json(name)}:{_json(value)}" for name, value in body.items())
    return Response(f"{{{','.join(fields)}}}".encode("utf-8", "replace"), media_type="application/json")


def _json(value: object) -> str:
    if not isinstance(value, list):
        return to_json(value)
    parts = (to_json(value[start : start + _PART])[1:-1] for start in range(0, len(value), _PART))
    return f"[{','.join(parts)}]"


def _rendered(request: TokenizeRequest, model: Model) -> str:
    names = "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"
    shown = {name: getattr(request, name) for name in names}
    chat = ChatRequest(model=request.model, tool_choice="none" if request.tools else None, **shown)
    return render(chat, model, plan_tools(chat, model.tool_format))


async def detokenize(gateway: Gateway, request: DetokenizeRequest, owner: bytes) -> Response:
    model = await gateway.catalog.find(request.model)
    return await gateway.tokenizing.run(
        owner, len(request.tokens), lambda: _response({"prompt": _text(model, request.tokens)})
    )


def _text(model: Model, token_ids: list[int]) -> str:
    tokenizer = model.tokenizer.loaded()
    if token_ids and max(token_ids) >= tokenizer.vocab_size:
        message = f"{max(token_ids)} is not in the vocabulary, accepted: 0 to {tokenizer.vocab_size - 1}"
        raise ApiError(400, f"tokens: token id {message}", param="tokens")
    return tokenizer.decode(token_ids, skip_special_tokens=False)
