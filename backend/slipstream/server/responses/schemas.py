"""The request of POST /v1/responses, with vLLM's sampling extensions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.server.chat_turn import MAX_INPUT_PARTS
from slipstream.server.field_bounds import IS_JSON, AnyObject, JsonObject, entries
from slipstream.server.schemas import MAX_TOOLS, Metadata, Strict, Text, TurnRequest, bounds_of


class FunctionTool(Strict):
    """Other types of tools run on OpenAI's servers; `type` refuses them."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class NamedFunction(Strict):
    type: Literal["function"]
    name: str


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Strict):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Strict):
    effort: str | None = None
    summary: str | None = None  # accepted; nothing is summarised


class ResponsesRequest(TurnRequest):
    """POST /v1/responses"""

    input: Text | Annotated[list[AnyObject], entries(MAX_INPUT_PARTS, 1), IS_JSON]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, bounds_of("max_tokens")] | None = None
    stream: bool | None = None
    tools: Annotated[list[FunctionTool], entries(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: Annotated[int, bounds_of("logprobs")] | None = None  # 0: answers have no log-probabilities
    user: str | None = None  # accepted without effect, as the rest
    include: Annotated[list[Text], entries(MAX_TOOLS)] | None = None
    max_tool_calls: int | None = None
    stream_options: JsonObject | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    def shown(self, name: str) -> Any:
        """A field as the answer repeats it."""
        value = getattr(self, name)
        dump = getattr(value, "model_dump", None)
        return dump(by_alias=True, exclude_none=True) if dump is not None else value
