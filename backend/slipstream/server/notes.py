"""What is noted of every request before it is answered: its id, its model, and what of it has no effect.

Event loop thread. The log has all of it, the header `warning` the last.
"""

from __future__ import annotations

from fastapi import Request

from slipstream.server.default_model import only_model
from slipstream.server.messages.schemas import MessagesRequest
from slipstream.server.responses.schemas import ResponsesRequest
from slipstream.server.schemas import ChatRequest, NamedRequest, TokenizeRequest
from slipstream.server.unknown_fields import unknown_fields, unknown_message_keys, warning

_WithTools = ChatRequest | TokenizeRequest | ResponsesRequest | MessagesRequest


async def note(body: NamedRequest, request: Request) -> list[str]:
    """Name the request for log and engine, and its model if it names none, and say what of it is ignored: these. Raises
    ApiError for a field not served."""
    record = request.state.record
    record.adopt_id(body.request_id or "")
    body.model = body.model or await only_model(request.app.state.gateway, body)
    body.request_id, record.model = record.request_id, body.model
    fields = unknown_fields(body, request.app.state.gateway.options.is_strict)
    if fields:
        record.warning = warning(body, fields)
    return fields


async def note_messages(body: ChatRequest | TokenizeRequest, request: Request) -> None:
    """As note, and of the messages, too: the model's template says which of their keys have a use."""
    fields, gateway = await note(body, request), request.app.state.gateway
    if any(message.model_extra for message in body.messages or ()):
        template = (await gateway.catalog.find(body.model)).template
        words = template.words if template is not None else frozenset()
        keys = unknown_message_keys(body, body.messages or (), words, gateway.options.is_strict)
        if keys:
            request.state.record.warning = warning(body, [*fields, *keys])
    await note_tools(body, request)


async def note_tools(body: _WithTools, request: Request) -> None:
    """Say, behind the ignored fields, that the model does not see the request's tools, if so."""
    if body.tools or (isinstance(body, ChatRequest) and body.functions):
        template = (await request.app.state.gateway.catalog.find(body.model)).template
        if template is not None and not template.shows_tools:
            record = request.state.record
            told = "tools: the model's chat template does not show them"
            record.warning = f"{record.warning}; {told}" if record.warning else told
