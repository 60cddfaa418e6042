"""POST /v1/responses, and GET and DELETE of the answers that are kept."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.responses import Response as HttpResponse

from slipstream.server.chat import plan_answer
from slipstream.server.chat_turn import ChatReader
from slipstream.server.errors import ApiError
from slipstream.server.gateway import Gateway, check_time_out
from slipstream.server.responses.answer import FORM, ResponseWriter, answer_message, count_reasoning
from slipstream.server.responses.input import Messages, input_messages, to_chat
from slipstream.server.responses.schemas import ResponsesRequest
from slipstream.server.sse import json_answer, to_bytes


async def respond(gateway: Gateway, request: ResponsesRequest, http: HttpRequest) -> HttpResponse:
    model = await gateway.catalog.find(request.model)
    owner = http.state.lease.owner
    earlier = await _earlier(gateway, owner, request.previous_response_id)
    generation, tools = await gateway.plan(http, lambda: plan_answer(to_chat(request, earlier), model), len(earlier))
    http.state.lease.prepare([generation], model)
    if not gateway.store.keeps:
        request.store = False

    def keep(body: dict[str, Any]) -> None:
        if request.store is not False:
            messages = [*earlier, *input_messages(request), answer_message(body)]
            body["store"] = gateway.store.put(owner, {**body, "store": True}, messages)

    writer = ResponseWriter(request, ChatReader(model, tools), tools, keep)
    if request.stream:
        return await gateway.stream(http, [generation], [writer], writer.last, FORM)
    [response] = await gateway.run(http, [generation])
    check_time_out(response.text("text_output"), response.text("finish_reason"), request.timeout_ms)

    def answer() -> bytes:
        writer.response(response)
        count_reasoning(writer.body, model)
        keep(writer.body)
        return to_bytes(writer.body)

    return json_answer(await asyncio.to_thread(answer))


async def _earlier(gateway: Gateway, owner: bytes, response_id: str | None) -> Messages:
    if response_id is None:
        return []
    return (await _kept(gateway, owner, response_id, "previous_response_id", 400))["messages"]


async def _kept(gateway: Gateway, owner: bytes, response_id: str, param: str, status: int) -> dict[str, Any]:
    found = await asyncio.to_thread(gateway.store.get, owner, response_id)
    if found is None:
        why = "is not kept (any more)" if gateway.store.keeps else "is not kept: --max-stored-bytes is 0"
        code = "previous_response_not_found" if status == 400 else "not_found"
        raise ApiError(status, f"{param}: the response {response_id[:80]!r} {why}", code=code, param=param)
    return found


async def retrieve(gateway: Gateway, response_id: str, http: HttpRequest) -> JSONResponse:
    return JSONResponse((await _kept(gateway, http.state.lease.owner, response_id, "response_id", 404))["body"])


async def delete(gateway: Gateway, response_id: str, http: HttpRequest) -> JSONResponse:
    owner = http.state.lease.owner
    await _kept(gateway, owner, response_id, "response_id", 404)
    await asyncio.to_thread(gateway.store.delete, owner, response_id)
    return JSONResponse({"id": response_id, "object": "response.deleted", "deleted": True})
