"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.responses import Response as HttpResponse

from slipstream.server.catalog import Model
from slipstream.server.chat import plan_answer, render
from slipstream.server.chat_turn import ChatReader
from slipstream.server.gateway import Gateway, check_time_out
from slipstream.server.messages.answer import FORM, MessageWriter
from slipstream.server.messages.input import to_chat
from slipstream.server.messages.schemas import CountTokensRequest, MessagesRequest
from slipstream.server.schemas import ChatRequest
from slipstream.server.sse import json_answer, to_bytes
from slipstream.server.tokenize import count
from slipstream.server.tools.select import plan_tools


async def send(gateway: Gateway, request: MessagesRequest, http: HttpRequest) -> HttpResponse:
    model = await gateway.catalog.find(request.model)
    generation, tools = await gateway.plan(http, lambda: plan_answer(to_chat(request), model))
    http.state.lease.prepare([generation], model)
    writer = MessageWriter(request, ChatReader(model, tools), tools)
    if request.stream:
        return await gateway.stream(http, [generation], [writer], writer.last, FORM)
    [response] = await gateway.run(http, [generation])
    check_time_out(response.text("text_output"), response.text("finish_reason"), request.timeout_ms)

    def answer() -> bytes:
        writer.response(response)
        return to_bytes(writer.body)

    return json_answer(await asyncio.to_thread(answer))


async def count_tokens(gateway: Gateway, request: CountTokensRequest, http: HttpRequest) -> JSONResponse:
    model = await gateway.catalog.find(request.model)
    text = await gateway.plan(http, lambda: _rendered(to_chat(request), model))
    return JSONResponse({"input_tokens": await count(gateway, model, text, http.state.lease.owner)})


def _rendered(chat: ChatRequest, model: Model) -> str:
    return render(chat, model, plan_tools(chat, model.tool_format))
