"""Request schemas: OpenAI's, with vLLM's sampling extensions. Checked strictly, once per request.

Unknown keys are kept, so that unknown_fields.py can name or refuse them. The fields of settings that go to the engine
unchanged are made from the rows of core/settings.py, bounds included. The engine checks what depends on the model.
FastAPI makes the OpenAPI schema of these classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from slipstream.core import setting_kinds as kinds
from slipstream.core.logits_processors import MAX_LOGITS_PROCESSORS
from slipstream.core.setting_values import MAX_ENTRIES, MAX_INT32
from slipstream.core.settings import (
    BY_NAME,
    MAX_CACHE_SALT_BYTES,
    MAX_REQUEST_ID_BYTES,
    PASSED_ON,
    SETTINGS,
    Setting,
)
from slipstream.server.field_bounds import IS_JSON, AnyObject, JsonObject, entries, pairs

MAX_TOKENIZED_CHARS, MAX_DETOKENIZED_TOKENS = 1 << 20, 1 << 20  # half a second
MAX_STOPS, MAX_MESSAGES, MAX_TOOLS, MAX_PROMPTS, MAX_DOCUMENTS = 64, 10_000, 128, 256, 1024
MAX_METADATA_PAIRS, MAX_METADATA_KEY_CHARS, MAX_METADATA_VALUE_CHARS = 16, 64, 512  # OpenAI's
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
Text = Annotated[str, Field(max_length=1 << 24)]
MetadataKey = Annotated[str, Field(max_length=MAX_METADATA_KEY_CHARS)]
MetadataValue = Annotated[str, Field(max_length=MAX_METADATA_VALUE_CHARS)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA_PAIRS), pairs(MAX_METADATA_PAIRS)]


class Strict(BaseModel):
    """Types are not converted."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class NamedRequest(Strict):
    """What every request has. model: may be left out, as with vLLM, where one model can answer. request_id: the
    client's name for it, in place of the gateway's (vLLM's field)."""

    model: Annotated[str, Field(max_length=512), BeforeValidator(lambda value: "" if value is None else value)] = ""
    request_id: Annotated[str, Field(max_length=MAX_REQUEST_ID_BYTES)] | None = None


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: the counts so far with every chunk
    include_obfuscation: bool = False  # accepted; nothing is padded


def field_type(setting: Setting) -> Any:
    """The type that a request's field has, with the bounds of the setting's kind."""
    kind = setting.kind
    if isinstance(kind, kinds.Integer):
        return Annotated[int, Field(ge=kind.low, le=kind.high)]
    if isinstance(kind, kinds.Number):
        return Annotated[float, Field(ge=kind.low, le=kind.high)]
    if isinstance(kind, kinds.Flag):
        return bool
    if isinstance(kind, kinds.Text):
        return Text if kind.max_bytes is None else Annotated[str, Field(max_length=kind.max_bytes)]
    if isinstance(kind, kinds.Choice):
        return Literal[kind.choices]
    if isinstance(kind, kinds.Texts):
        return Text | Annotated[list[Text], entries(MAX_ENTRIES)]
    if isinstance(kind, kinds.TokenIds):
        least = 0 if kind.is_empty_accepted else 1
        return Annotated[list[TokenId], entries(kind.max_entries, least)]
    if isinstance(kind, kinds.TokenBiases):
        bias = Annotated[float, Field(ge=-kind.limit, le=kind.limit)]
        return Annotated[dict[str, bias], Field(max_length=MAX_ENTRIES), pairs(MAX_ENTRIES)]
    if isinstance(kind, kinds.Object):
        return JsonObject
    if isinstance(kind, kinds.Processors):
        return Annotated[list[Text | JsonObject], entries(MAX_LOGITS_PROCESSORS)]
    raise TypeError(f"{setting.name}: a request in JSON has no {type(kind).__name__}")


def passed_on(settings: Iterable[Setting]) -> tuple[Setting, ...]:
    """Settings that have the engine's name in requests and go to it unchanged."""
    return tuple(setting for setting in settings if setting.openai == PASSED_ON)


def make_fields(settings: Iterable[Setting]) -> dict[str, Any]:
    """Fields of a request, for `create_model`. None means the model's default."""
    return {
        setting.name: (field_type(setting) | None, Field(default=None, description=setting.doc))
        for setting in passed_on(settings)
    }


def bounds_of(name: str) -> FieldInfo:
    """Bounds of an integer setting, for a field that is declared here because code of the gateway reads it."""
    kind = BY_NAME[name].kind
    assert isinstance(kind, kinds.Integer)
    return Field(ge=kind.low, le=kind.high)


if TYPE_CHECKING:
    PassedOn = NamedRequest
else:
    PassedOn = create_model("PassedOn", __base__=NamedRequest, **make_fields(SETTINGS))


class TurnRequest(PassedOn):
    """What requests of other chat APIs (responses/, messages/) share."""

    n: Annotated[int, bounds_of("n")] | None = None
    timeout_ms: Annotated[int, bounds_of("timeout_ms")] | None = None
    truncate_prompt_tokens: Annotated[int, bounds_of("truncate_prompt_tokens")] | None = None
    chat_template_kwargs: JsonObject | None = None


class Sampling(PassedOn):
    """Fields of both kinds of generation, beside the settings that are passed on. None: the model's default."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, bounds_of("n")] | None = None
    stop: Text | Annotated[list[Text], entries(MAX_STOPS)] | None = None
    user: str | None = None  # accepted without effect, as the next six
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # beyond OpenAI's
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_BYTES)] | None = None
    timeout_ms: Annotated[int, bounds_of("timeout_ms")] | None = None
    stream_interval: Annotated[int, Field(ge=1, le=4096)] | None = None
    structured_outputs: JsonObject | None = None
    speculation: JsonObject | None = None  # the model's speculation settings, by the engine's names
    prompt_logprobs: Annotated[int, bounds_of("prompt_logprobs")] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    guided_json: Text | JsonObject | None = None  # structured_outputs, as vLLM named it before
    guided_regex: Text | None = None
    guided_choice: Annotated[list[Text], entries(MAX_ENTRIES)] | None = None
    guided_grammar: Text | None = None


class JsonSchema(Strict):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """format, or structures and triggers: of a structural tag, as xgrammar and vLLM have it."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: JsonObject | None = None
    structures: Annotated[list[AnyObject], entries(MAX_ENTRIES), IS_JSON] | None = None
    triggers: Annotated[list[Text], entries(MAX_ENTRIES)] | None = None


class FunctionDefinition(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: JsonObject | None = None
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
    content: Text | Annotated[list[TextPart], entries(MAX_MESSAGES)]


class Message(BaseModel):
    """Keys beyond these (`reasoning_content`, ...) go to the template as they are."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Text | Annotated[list[TextPart], entries(MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], entries(MAX_TOOLS)] | None = None
    tool_call_id: str | None = None


class ChatRequest(Sampling):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], entries(MAX_MESSAGES, 1)]
    max_tokens: Annotated[int, bounds_of("max_tokens")] | None = None
    max_completion_tokens: Annotated[int, bounds_of("max_tokens")] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, bounds_of("logprobs")] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], entries(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    thinking_token_budget: Annotated[int, bounds_of("max_tokens")] | None = None  # of the reasoning; then it is ended
    include_reasoning: bool | None = None  # false: left out of the answer
    reasoning_effort: str | None = None  # to the template, as the next three
    verbosity: str | None = None
    documents: Annotated[list[AnyObject], entries(MAX_DOCUMENTS), IS_JSON] | None = None
    chat_template_kwargs: JsonObject | None = None
    echo: bool | None = None  # begin with the last message, if that is the assistant's
    add_special_tokens: bool | None = None  # the tokenizer's, beside the template's
    functions: Annotated[list[FunctionDefinition], entries(MAX_TOOLS)] | None = None  # OpenAI's older tools
    function_call: Literal["none", "auto"] | FunctionName | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


Prompt = (
    Text
    | Annotated[list[TokenId], entries(None, 1)]
    | Annotated[list[Text], entries(MAX_PROMPTS, 1)]
    | Annotated[list[Annotated[list[TokenId], entries(None, 1)]], entries(MAX_PROMPTS, 1)]
)


class CompletionRequest(Sampling):
    """POST /v1/completions"""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None  # 0: the prompt alone
    logprobs: Annotated[int, bounds_of("logprobs")] | None = None
    echo: bool | None = None
    best_of: Annotated[int, bounds_of("best_of")] | None = None
    suffix: str | None = None
    truncate_prompt_tokens: Annotated[int, bounds_of("truncate_prompt_tokens")] | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(NamedRequest):
    """POST /tokenize"""

    prompt: Text | None = None
    messages: Annotated[list[Message], entries(MAX_MESSAGES, 1)] | None = None
    add_special_tokens: bool | None = None  # by default of a prompt, but not of a chat, whose template writes them
    return_token_strs: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Annotated[list[Tool], entries(MAX_TOOLS)] | None = None
    chat_template_kwargs: JsonObject | None = None


class DetokenizeRequest(NamedRequest):
    """POST /detokenize"""

    tokens: Annotated[list[TokenId], entries(MAX_DETOKENIZED_TOKENS)]


def _refuse_token_ids(value: Any) -> Any:
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, (int, list)):
        told = "token ids are not served, as they are of another model's tokenizer; accepted: text"
        raise PydanticCustomError("token_ids", f"{told} (LangChain: check_embedding_ctx_length=False)")
    return value


class EmbeddingRequest(NamedRequest):
    """POST /v1/embeddings"""

    input: Annotated[Text | Annotated[list[Text], entries(2048, 1)], BeforeValidator(_refuse_token_ids)]
    encoding_format: Literal["float", "base64"] | None = None  # float; LiteLLM sends null
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None


Texts = Text | Annotated[list[Text], entries(MAX_DOCUMENTS, 1)]


class ScoreRequest(NamedRequest):
    """POST /v1/score"""

    text_1: Texts
    text_2: Texts
    truncate_prompt_tokens: int | None = None  # accepted: the encoder cuts a long text by itself
    user: str | None = None


class Document(Strict):
    text: Text


class RerankRequest(NamedRequest):
    """POST /v1/rerank"""

    query: Text
    documents: Annotated[list[Text | Document], entries(MAX_DOCUMENTS, 1)]
    top_n: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None  # 0: all, as with vLLM
    return_documents: bool | None = None
    truncate_prompt_tokens: int | None = None  # as above
    user: str | None = None


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Every status from 400 on."""

    error: ErrorDetail


class MessagesErrorBody(ErrorBody):
    """As Anthropic's API has it, whose types of errors these are."""

    type: Literal["error"]
