"""The requests of POST /v1/messages and /v1/messages/count_tokens, with vLLM's sampling extensions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slipstream.server.chat_turn import MAX_INPUT_PARTS
from slipstream.server.field_bounds import IS_JSON, AnyObject, JsonObject, entries, pairs
from slipstream.server.schemas import (
    MAX_MESSAGES,
    MAX_METADATA_PAIRS,
    MAX_STOPS,
    MAX_TOOLS,
    MetadataKey,
    MetadataValue,
    Strict,
    Text,
    TurnRequest,
    bounds_of,
)

NullableMetadata = Annotated[
    dict[MetadataKey, MetadataValue | None], Field(max_length=MAX_METADATA_PAIRS), pairs(MAX_METADATA_PAIRS)
]
Content = Text | Annotated[list[AnyObject], entries(MAX_INPUT_PARTS), IS_JSON]


class Turn(Strict):
    role: Literal["user", "assistant", "system"]
    content: Content


class MessageTool(Strict):
    """Other types of tools run on Anthropic's servers; `type` refuses them."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: JsonObject


class MessageToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputForm(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(Strict):
    format: OutputForm | None = None
    effort: str | None = None


class CountTokensRequest(TurnRequest):
    """POST /v1/messages/count_tokens: what of a request makes its prompt."""

    messages: Annotated[list[Turn], entries(MAX_MESSAGES, 1)]
    system: Content | None = None
    tools: Annotated[list[MessageTool], entries(MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: JsonObject | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages"""

    max_tokens: Annotated[int, bounds_of("max_tokens")]
    stop_sequences: Annotated[list[Text], entries(MAX_STOPS)] | None = None
    stream: bool | None = None
    metadata: NullableMetadata | None = None  # accepted without effect, as the next
    service_tier: str | None = None
