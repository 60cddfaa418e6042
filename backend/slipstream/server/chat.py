"""POST /v1/chat/completions: messages -> prompt by the model's template, the model's text -> messages or chunks."""

from __future__ import annotations

import asyncio
import difflib
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse

from slipstream.core.chat_messages import for_template
from slipstream.server import logprobs as logprob_forms
from slipstream.server.catalog import Model
from slipstream.server.errors import ApiError, refused
from slipstream.server.gateway import (
    Gateway,
    check_echo,
    check_time_out,
    finish_reason,
    new_head,
    outputs_for,
    safety_of,
    timed_out,
)
from slipstream.server.generation import Generation, Response
from slipstream.server.reasoning import guide_behind, plan_reasoning, with_reasoning
from slipstream.server.sampling import UNLIMITED_TOKENS, sampling_parameters
from slipstream.server.schemas import ChatRequest, Message, TextPart
from slipstream.server.sse import TextEvents, event, json_answer, to_bytes
from slipstream.server.token_ids import ids_of_piece, output_ids, stop_reason, with_further_outputs
from slipstream.server.tools.json_call import CallArguments, CallStart, Content, Event, Reasoning
from slipstream.server.tools.select import ToolUse, plan_tools
from slipstream.server.unknown_fields import shown
from slipstream.server.usage import Usage

_ROLES_WITH_CONTENT = frozenset({"system", "developer", "user", "assistant", "tool"})
_MOST_HINTS = 32  # keys of a message that are compared with `content`, and characters of one
_INSTEAD_OF_CONTENT = ("function_call", "reasoning_content", "reasoning", "refusal")


async def chat(gateway: Gateway, request: ChatRequest, http: HttpRequest) -> HttpResponse:
    model = await gateway.catalog.find(request.model)
    if request.logprobs:
        await asyncio.to_thread(model.tokenizer.prepare)
    generation, tools = await gateway.plan(http, lambda: plan_answer(request, model))
    http.state.lease.prepare([generation], model)
    if request.stream:
        writer = ChatWriter(request, model, tools)
        return await gateway.stream(http, [generation], [writer], writer.last)
    [response] = await gateway.run(http, [generation])
    return json_answer(await asyncio.to_thread(_whole_data, request, model, tools, response))


def plan_answer(request: ChatRequest, model: Model) -> tuple[Generation, ToolUse]:
    """What the engine is asked for, and how its text is read. Raises ApiError."""
    check_echo(len(echoed(request)), request.n or 1)
    tools = plan_tools(request, model.tool_format)
    prompt = render(request, model, tools)
    reasoning = plan_reasoning(request, model.reasoning_format, prompt)
    tools = with_reasoning(tools, reasoning)
    sampling = _sampling(request, model, tools)
    guide = sampling.get("structured_outputs")
    guide = guide_behind(reasoning, guide, request.thinking_token_budget, is_of_calls=tools.guide is not None)
    if guide is not None:
        sampling["structured_outputs"] = guide
    if model.adapter:
        sampling["lora_name"] = model.adapter
    usage = not request.stream or wants_usage(request)
    outputs = outputs_for(
        model, stream=bool(request.stream), n=request.n or 1, usage=usage, logprobs=bool(request.logprobs)
    )
    outputs = with_further_outputs(request, model, outputs)
    return Generation(model.triton_name, prompt, sampling, outputs, bool(request.stream)), tools


def _sampling(request: ChatRequest, model: Model, tools: ToolUse) -> dict[str, Any]:
    by_default = None if model.max_new_tokens else UNLIMITED_TOKENS  # None: the model's own
    max_tokens = request.max_completion_tokens or request.max_tokens or by_default
    sampling = sampling_parameters(request, max_tokens, request.response_format)
    if tools.guide is not None:
        if "structured_outputs" in sampling:
            message = "tool_choice: a forced call and response_format exclude each other"
            raise ApiError(400, message, param="tool_choice")
        sampling["structured_outputs"] = tools.guide
    if tools.shows_marks:
        sampling["skip_special_tokens"] = False
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs=true", param="top_logprobs")
    if request.logprobs:
        sampling["logprobs"] = request.top_logprobs or 0
    if request.prediction is not None and "ngram" in model.speculative_methods:  # elsewhere it is a hint without use
        sampling["reference_text"] = plain_text(request.prediction.content)
        sampling.setdefault("speculative_method", "ngram")
    sampling["add_special_tokens"] = bool(request.add_special_tokens)  # the template writes them
    if request.stream_interval:
        sampling["stream_interval"] = request.stream_interval
    return sampling


def wants_usage(request: ChatRequest) -> bool:
    return request.stream_options is not None and request.stream_options.include_usage


def render(request: ChatRequest, model: Model, tools: ToolUse) -> str:
    if model.template is None:
        raise ApiError(400, f"The model {model.name!r} cannot chat: {model.no_template}", param="model")
    extra: dict[str, Any] = dict(request.chat_template_kwargs or {})
    for name in ("reasoning_effort", "verbosity", "documents"):
        if (value := getattr(request, name)) is not None:
            extra.setdefault(name, value)
    return model.template.render(
        [templated(message, index) for index, message in enumerate(request.messages)],
        tools.tools,
        request.add_generation_prompt,
        request.continue_final_message,
        extra,
    )


def plain_text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def check_content(message: Message, index: int) -> None:
    """Raises ApiError for a message without content, which the template would take for an empty one.

    An assistant's may have something else instead: calls, or thoughts that were cut off. Roles that only the model's
    template knows are its own affair.
    """
    if message.content is not None or message.role not in _ROLES_WITH_CONTENT:
        return
    extra = message.model_extra or {}
    if message.role == "assistant" and (message.tool_calls or any(extra.get(name) for name in _INSTEAD_OF_CONTENT)):
        return
    names = [name for name in list(extra)[:_MOST_HINTS] if len(name) <= _MOST_HINTS]
    close = difflib.get_close_matches("content", names, n=1, cutoff=0.8)
    path, hint = f"messages[{index}].content", f"; did you mean it by {shown(close[0])}?" if close else ""
    raise ApiError(400, f"{path}: is missing, accepted: a text or a list of text parts{hint}", param=path)


def templated(message: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it, with content. Raises ApiError."""
    check_content(message, index)
    with refused():
        body = for_template(message.model_dump(exclude_none=True), f"messages[{index}]")
    body.setdefault("content", "")
    return body


# ---------------------------------------------------------------- whole answers


def _whole_data(request: ChatRequest, model: Model, tools: ToolUse, response: Response) -> bytes:
    """Not on the event loop: a call of 1 MB takes seconds to read, log-probabilities as long to write."""
    body = whole_answer(request, model, tools, response)
    count_reasoning(body, model)
    return to_bytes(body)


def whole_answer(request: ChatRequest, model: Model, tools: ToolUse, response: Response) -> dict[str, Any]:
    usage = Usage(model)
    usage.add(response)
    texts, reasons = response.texts("text_output"), response.texts("finish_reason")
    entries = response.texts("logprobs") if request.logprobs else []
    choices = []
    for index, (text, reason) in enumerate(zip(texts, reasons)):
        check_time_out(text, reason, request.timeout_ms)
        message, has_calls = whole_message(text, tools)
        if echo := echoed(request):
            message["content"] = echo + (message["content"] or "")
        choice: dict[str, Any] = {"index": index, "message": message, "logprobs": None}
        if request.logprobs:
            choice["logprobs"] = logprob_forms.written_chat_logprobs(entries[index], form_of(request, model))
        ended = finish_reason(reason)
        choice["finish_reason"] = tools.finish_reason if has_calls and ended == "stop" else ended
        choice |= timed_out(reason) | stop_reason(request, response, index)
        if request.return_token_ids:
            choice["token_ids"] = output_ids(response)[index]
        choices.append(choice)
    head = {**new_head("chat.completion", "chatcmpl", request.request_id or "", model), **safety_of(model, response)}
    if request.return_token_ids:
        head["prompt_token_ids"] = response.integers("prompt_token_ids")
    if request.prompt_logprobs is not None:
        head["prompt_logprobs"] = logprob_forms.parse(response.text("prompt_logprobs"))
    return {**head, "choices": choices, "usage": usage.to_json()}


def count_reasoning(body: dict[str, Any], model: Model) -> None:
    """Add the tokens of the reasoning to the usage of a whole answer: of its text, as the engine counts all in one. Not
    on the event loop."""
    texts = [text for choice in body["choices"] if (text := choice["message"].get("reasoning_content"))]
    if texts and body["usage"] is not None and model.tokenizer.is_there:
        count = min(
            model.tokenizer.count(texts), body["usage"]["completion_tokens"]
        )  # another cut of the text may have more
        body["usage"].setdefault("completion_tokens_details", {})["reasoning_tokens"] = count


def form_of(request: ChatRequest, model: Model) -> logprob_forms.LogprobForm:
    shows_ids = bool(request.return_tokens_as_token_ids)
    return logprob_forms.LogprobForm(model.tokenizer, request.top_logprobs or 0, shows_ids)


def echoed(request: ChatRequest) -> str:
    """The text that `echo` puts in front: a last message of the assistant's, which the answer continues."""
    last = request.messages[-1]
    return plain_text(last.content or "") if request.echo and last.role == "assistant" else ""


def whole_message(text: str, tools: ToolUse) -> tuple[dict[str, Any], bool]:
    """The message, and whether it calls tools."""
    if tools.make_parser is None:
        return {"role": "assistant", "content": text, "refusal": None}, False
    parser = tools.make_parser()
    content, thoughts, calls, arguments = "", "", list[dict[str, Any]](), list[list[str]]()
    for found in [*parser.feed(text), *parser.finish()]:
        if isinstance(found, Content):
            content += found.text
        elif isinstance(found, Reasoning):
            thoughts += found.text
        elif isinstance(found, CallStart):
            function = {"name": found.name, "arguments": ""}
            calls.append({"id": found.call_id or tools.make_id(), "type": "function", "function": function})
            arguments.append([])
        else:
            arguments[-1].append(found.text)
    for call, texts in zip(calls, arguments):
        call["function"]["arguments"] = "".join(texts)
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not (calls or thoughts) else None}
    if thoughts:
        message.update(_reasoning(thoughts))
    message["refusal"] = None
    if calls and tools.is_legacy:
        message["function_call"] = calls[0]["function"]
    elif calls:
        message["tool_calls"] = calls
    return message, bool(calls)


def _reasoning(text: str) -> dict[str, str]:
    """DeepSeek's name of it, which most clients read, and the one that vLLM has now."""
    return {"reasoning_content": text, "reasoning": text}


# ---------------------------------------------------------------- streamed answers


class ChatWriter:
    """The chunks of one streamed answer. Text alone, the usual case, goes through prepared JSON."""

    def __init__(self, request: ChatRequest, model: Model, tools: ToolUse) -> None:
        self._head = new_head("chat.completion.chunk", "chatcmpl", request.request_id or "", model)
        self._request, self._model, self._tools = request, model, tools
        self._num_choices = request.n or 1
        self._form = form_of(request, model) if request.logprobs else None
        self._echo, self._has_ids = echoed(request), bool(request.return_token_ids)
        self._usage = Usage(model) if wants_usage(request) else None
        options = request.stream_options
        self._has_running_usage = bool(options and options.include_usage and options.continuous_usage_stats)
        if self._usage is not None:
            self._head["usage"] = None
        self._parsers = [tools.make_parser() for _ in range(self._num_choices)] if tools.make_parser else []
        self._num_calls = [0] * self._num_choices
        self._texts = [self._text_events(index) for index in range(self._num_choices)]

    def _text_events(self, index: int) -> TextEvents:
        return TextEvents(self._head, lambda text: _choice(index, {"content": text}))

    def start(self) -> bytes:
        role = {"role": "assistant", "content": self._echo}
        return b"".join(self._chunk(_choice(index, role)) for index in range(self._num_choices))

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return event({**self._head, "choices": [choice]})

    def response(self, response: Response) -> bytes:
        index = response.integer("sequence_index") if self._num_choices > 1 else 0
        text, reason = response.text("text_output"), response.text("finish_reason")
        if self._usage is not None:
            self._usage.add(response, index)
            if self._has_running_usage:
                self._head["usage"] = self._usage.to_json()
        data = b""
        if self._parsers:
            events = self._parsers[index].feed(text)
            if self._usage is not None and self._tools.has_reasoning:
                self._usage.add_reasoning(response, index, events)
            data = self._parsed(index, events, response)
        elif self._form is not None or self._has_ids:
            ids = ids_of_piece(response) if self._has_ids else {}
            data = self._chunk({**_choice(index, {"content": text}, self._logprobs(response)), **ids})
        elif text and self._has_running_usage:
            data = self._chunk(_choice(index, {"content": text}))
        elif text:
            data = self._texts[index].make(text)
        if verdict := safety_of(self._model, response):
            data += event({**self._head, "choices": [], **verdict})
        return data + self._finish(index, reason, response) if reason else data

    def _logprobs(self, response: Response) -> dict[str, Any] | None:
        if self._form is None:
            return None
        return logprob_forms.chat_logprobs(logprob_forms.parse(response.text("logprobs")), self._form)

    def _parsed(self, index: int, events: list[Event], response: Response | None) -> bytes:
        data = b""
        logprobs = self._logprobs(response) if response is not None else None
        ids = ids_of_piece(response) if response is not None and self._has_ids else {}
        for found in events:
            data += self._chunk({**_choice(index, self._delta(index, found), logprobs), **ids})
            logprobs, ids = None, {}
        if logprobs or ids:  # tokens whose text is held back or is a mark have them too
            data += self._chunk({**_choice(index, {}, logprobs), **ids})
        return data

    def _delta(self, index: int, found: Event) -> dict[str, Any]:
        if isinstance(found, Content):
            return {"content": found.text}
        if isinstance(found, Reasoning):
            return _reasoning(found.text)
        if self._tools.is_legacy:
            return self._legacy_delta(index, found)
        if isinstance(found, CallArguments):
            return {"tool_calls": [{"index": self._num_calls[index] - 1, "function": {"arguments": found.text}}]}
        number = self._num_calls[index]
        self._num_calls[index] += 1
        function = {"name": found.name, "arguments": ""}
        call_id = found.call_id or self._tools.make_id()
        return {"tool_calls": [{"index": number, "id": call_id, "type": "function", "function": function}]}

    def _legacy_delta(self, index: int, found: CallStart | CallArguments) -> dict[str, Any]:
        """The first call alone: `function_call` has no room for more."""
        self._num_calls[index] += isinstance(found, CallStart)
        if self._num_calls[index] > 1:
            return {}
        if isinstance(found, CallStart):
            return {"function_call": {"name": found.name, "arguments": ""}}
        return {"function_call": {"arguments": found.text}}

    def _finish(self, index: int, reason: str, response: Response) -> bytes:
        data = self._parsed(index, self._parsers[index].finish(), None) if self._parsers else b""
        ended = finish_reason(reason)
        if self._num_calls[index] and ended == "stop":
            ended = self._tools.finish_reason
        further = timed_out(reason) | stop_reason(self._request, response)
        return data + self._chunk({**_choice(index, {}), "finish_reason": ended, **further})

    def end(self) -> bytes:
        return b""

    async def last(self) -> bytes:
        usage = self._usage.to_json() if self._usage is not None else None
        return event({**self._head, "choices": [], "usage": usage}) if usage is not None else b""


def _choice(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
