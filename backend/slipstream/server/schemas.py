"""What clients may send: OpenAI's requests, with vLLM's sampling extensions. Checked strictly, once per request.

A key that neither serves nor may be passed over is refused, as OpenAI does: a misspelt setting must not be ignored.
Limits that depend on the model are the engine's to say. FastAPI makes the OpenAPI schema of these classes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

MAX_STOPS, MAX_MESSAGES, MAX_TOOLS, MAX_PROMPTS, MAX_CHOICES = 64, 10_000, 128, 256, 128
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(max_length=1 << 24)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: the counts so far with every chunk
    include_obfuscation: bool = False  # accepted; nothing is padded


class Sampling(Strict):
    """What both kinds of generation have. None means the model's default."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    user: str | None = None  # accepted without effect, as the next four
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    # beyond OpenAI's, by vLLM's names
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    timeout_ms: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    stream_interval: Annotated[int, Field(ge=1, le=4096)] | None = None
    structured_outputs: dict[str, JsonValue] | None = None
    speculation: dict[str, JsonValue] | None = None  # the model's speculation settings, by the engine's names


class JsonSchema(Strict):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    schema_: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class FunctionDefinition(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class Prediction(Strict):
    """OpenAI's predicted outputs: text that the answer will mostly repeat."""

    type: Literal["content"]
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)]


class Message(BaseModel):
    """Keys beyond these (`reasoning_content`, ...) go to the template as they are."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None


class ChatRequest(Sampling):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    reasoning_effort: str | None = None  # to the template, as the next
    chat_template_kwargs: dict[str, JsonValue] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


Prompt = (
    Text
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
)


class CompletionRequest(Sampling):
    """POST /v1/completions"""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None


class EmbeddingRequest(Strict):
    """POST /v1/embeddings"""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    input: Text | Annotated[list[Text], Field(min_length=1, max_length=2048)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Every status from 400 on."""

    error: ErrorDetail


Json = dict[str, Any]
