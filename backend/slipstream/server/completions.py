"""POST /v1/completions: one or many prompts, as text or token ids, whole or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse

from slipstream.server import logprobs as logprob_forms
from slipstream.server.catalog import Model
from slipstream.server.errors import ApiError
from slipstream.server.gateway import (
    Gateway,
    check_echo,
    check_time_out,
    finish_reason,
    new_head,
    outputs_for,
    require_output,
    timed_out,
)
from slipstream.server.generation import Generation, Response
from slipstream.server.sampling import sampling_parameters
from slipstream.server.schemas import CompletionRequest
from slipstream.server.sse import TextEvents, event, json_answer, to_bytes
from slipstream.server.token_ids import ids_of_piece, output_ids, stop_reason, with_further_outputs
from slipstream.server.usage import Usage

PromptValue = str | Sequence[int]


async def complete(gateway: Gateway, request: CompletionRequest, http: HttpRequest) -> HttpResponse:
    model = await gateway.catalog.find(request.model)
    check(request)
    if request.logprobs is not None or (request.max_tokens == 0 and request.echo):
        await asyncio.to_thread(model.tokenizer.prepare)
    generations = make_generations(request, model)
    http.state.lease.prepare(generations, model)
    if request.stream:
        answer = StreamedAnswer(request, model)
        writers = [answer.writer(number, generation.prompt) for number, generation in enumerate(generations)]
        return await gateway.stream(http, generations, writers, answer.last)
    responses = await gateway.run(http, generations)
    return json_answer(await asyncio.to_thread(lambda: to_bytes(whole_answer(request, model, generations, responses))))


def check(request: CompletionRequest) -> None:
    """Checks that the schema cannot express. Raises ApiError."""
    if request.echo:
        check_echo(sum(map(len, prompts_of(request))), request.n or 1)
    if request.suffix:
        raise ApiError(400, "suffix: the model does not fill in the middle, accepted: no suffix", param="suffix")
    if request.best_of not in (None, request.n or 1):
        message = f"best_of: got {request.best_of}, accepted: n={request.n or 1}; every sequence made is returned"
        raise ApiError(400, message, param="best_of")
    if request.echo and request.truncate_prompt_tokens is not None:
        message = "echo and truncate_prompt_tokens: accepted: one of them, as the echo would be of the whole prompt"
        raise ApiError(400, message, param="echo")
    if request.stream and request.echo and not all(isinstance(prompt, str) for prompt in prompts_of(request)):
        raise ApiError(400, "echo: a prompt of token ids is echoed only without stream", param="echo")
    if request.stream and request.echo and request.logprobs is not None:
        raise ApiError(400, "echo: with logprobs only without stream", param="echo")
    if request.echo and (request.n or 1) > 1 and request.logprobs is not None:
        raise ApiError(400, "echo: with logprobs only for n=1", param="echo")


def prompts_of(request: CompletionRequest) -> list[PromptValue]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return list(prompt)  # type: ignore[arg-type]


def make_generations(request: CompletionRequest, model: Model) -> list[Generation]:
    max_tokens = None if request.max_tokens is None else max(1, request.max_tokens)
    sampling = sampling_parameters(request, max_tokens, request.response_format)
    if request.add_special_tokens is not None:
        sampling["add_special_tokens"] = request.add_special_tokens
    has_logprobs = request.logprobs is not None
    if has_logprobs:
        sampling["logprobs"] = request.logprobs
    stream, n = bool(request.stream), request.n or 1
    outputs = outputs_for(model, stream=stream, n=n, usage=not stream or wants_usage(request), logprobs=has_logprobs)
    if request.echo and not stream:
        sampling["exclude_input_in_output"] = False
        if has_logprobs:
            sampling.setdefault("prompt_logprobs", request.logprobs)
            require_output(model, "prompt_logprobs", "echo", "without logprobs only")
            outputs = (*outputs, "prompt_logprobs")
    outputs = with_further_outputs(request, model, outputs)
    if model.adapter:
        sampling["lora_name"] = model.adapter
    if request.stream_interval:
        sampling["stream_interval"] = request.stream_interval
    prompts = prompts_of(request)
    if "input_ids" not in model.inputs and not all(isinstance(prompt, str) for prompt in prompts):
        raise ApiError(400, f"prompt: the model {model.name!r} takes no token ids, accepted: text", param="prompt")
    return [Generation(model.triton_name, prompt, dict(sampling), outputs, stream) for prompt in prompts]


def wants_usage(request: CompletionRequest) -> bool:
    return request.stream_options is not None and request.stream_options.include_usage


# ---------------------------------------------------------------- whole answers


def whole_answer(
    request: CompletionRequest, model: Model, generations: Sequence[Generation], responses: Sequence[Response]
) -> dict[str, Any]:
    usage = Usage(model)
    choices: list[dict[str, Any]] = []
    for number, (generation, response) in enumerate(zip(generations, responses)):
        usage.add(response, number, is_prompt_new=True)
        texts, reasons = response.texts("text_output"), response.texts("finish_reason")
        for sequence, (text, reason) in enumerate(zip(texts, reasons)):
            check_time_out(text, reason, request.timeout_ms)
            choice: dict[str, Any] = {"index": len(choices), "text": text, "logprobs": None}
            if request.logprobs is not None:
                choice["logprobs"] = _logprobs(request, model, generation.prompt, response, sequence)
            choice |= {"finish_reason": finish_reason(reason), **timed_out(reason)}
            choice |= stop_reason(request, response, sequence)
            if request.return_token_ids:
                choice["token_ids"] = output_ids(response)[sequence]
                choice["prompt_token_ids"] = response.integers("prompt_token_ids")
            if request.prompt_logprobs is not None:
                choice["prompt_logprobs"] = logprob_forms.parse(response.text("prompt_logprobs"))
            if request.max_tokens == 0:
                _drop_output(choice, request, model, generation)
            choices.append(choice)
    if request.max_tokens == 0:
        usage.completion_tokens = 0
    head = new_head("text_completion", "cmpl", request.request_id or "", model)
    return {**head, "choices": choices, "usage": usage.to_json()}


def _logprobs(
    request: CompletionRequest, model: Model, prompt: PromptValue, response: Response, sequence: int
) -> dict[str, Any]:
    form, first = form_of(request, model), ""
    entries = logprob_forms.parse(response.texts("logprobs")[sequence])
    if request.max_tokens == 0:
        entries = []
    if request.echo:
        echoed = logprob_forms.parse(response.texts("prompt_logprobs")[sequence])
        first = logprob_forms.first_token_text(prompt, echoed, form)
        entries = echoed + entries
    return logprob_forms.completion_logprobs(entries, form, first=first)


def form_of(request: CompletionRequest, model: Model) -> logprob_forms.LogprobForm:
    return logprob_forms.LogprobForm(model.tokenizer, request.logprobs or 0, bool(request.return_tokens_as_token_ids))


def _drop_output(choice: dict[str, Any], request: CompletionRequest, model: Model, generation: Generation) -> None:
    """Drop the one token that the engine generates for max_tokens=0 (the prompt's text and log-probabilities only)."""
    choice["finish_reason"] = "length"
    choice.pop("stop_reason", None)
    if request.return_token_ids:
        choice["token_ids"] = []
    if not request.echo:
        choice["text"] = ""
    elif isinstance(generation.prompt, str):
        choice["text"] = generation.prompt
    elif choice["logprobs"] is not None and not model.tokenizer.is_there:
        choice["text"] = "".join(choice["logprobs"]["tokens"])
    else:
        has_no_special = generation.sampling.get("skip_special_tokens", True)
        choice["text"] = model.tokenizer.loaded().decode(list(generation.prompt), has_no_special)


# ---------------------------------------------------------------- streamed answers


class StreamedAnswer:
    """Shared by the streams of one request: head and usage, which may come with every chunk."""

    def __init__(self, request: CompletionRequest, model: Model) -> None:
        self.request, self.model = request, model
        self.head = new_head("text_completion", "cmpl", request.request_id or "", model)
        self.usage = Usage(model) if wants_usage(request) else None
        options = request.stream_options
        is_running = options is not None and options.include_usage and options.continuous_usage_stats
        self.has_running_usage = is_running and request.max_tokens != 0  # then the one token is not told of
        if self.usage is not None:
            self.head["usage"] = None

    def writer(self, number: int, prompt: PromptValue) -> CompletionWriter:
        return CompletionWriter(self, number, prompt if self.request.echo and isinstance(prompt, str) else "")

    async def last(self) -> bytes:
        if self.usage is not None and self.request.max_tokens == 0:
            self.usage.completion_tokens = 0
        usage = self.usage.to_json() if self.usage is not None else None
        return event({**self.head, "choices": [], "usage": usage}) if usage is not None else b""


class CompletionWriter:
    """The chunks of prompt `number`; its n sequences have the indices from number * n on."""

    def __init__(self, answer: StreamedAnswer, number: int, echo: str) -> None:
        self._answer, self._number, self._echo = answer, number, echo
        self._n = answer.request.n or 1
        has_logprobs = answer.request.logprobs is not None
        self._form = form_of(answer.request, answer.model) if has_logprobs else None
        self._has_ids = bool(answer.request.return_token_ids)
        self._is_first = True
        self._offsets = [len(echo)] * self._n
        self._texts: dict[int, TextEvents] = {}  # by sequence

    def _text(self, sequence: int, text: str) -> bytes:
        if sequence not in self._texts:
            self._texts[sequence] = TextEvents(self._answer.head, partial(_choice, self._number * self._n + sequence))
        return self._texts[sequence].make(text)

    def start(self) -> bytes:
        return b"".join(self._text(sequence, self._echo) for sequence in range(self._n)) if self._echo else b""

    def response(self, response: Response) -> bytes:
        sequence = response.integer("sequence_index") if self._n > 1 else 0
        text, reason = response.text("text_output"), response.text("finish_reason")
        if self._answer.usage is not None:
            self._answer.usage.add(response, self._number * self._n + sequence, self._is_first)
            if self._answer.has_running_usage:
                self._answer.head["usage"] = self._answer.usage.to_json()
        self._is_first = False
        if self._answer.request.max_tokens == 0:
            return self._without_output(response, sequence) if reason else b""
        is_text_alone = not reason and self._form is None and not self._has_ids
        if is_text_alone and not (text and self._answer.has_running_usage):
            return self._text(sequence, text) if text else b""
        choice = _choice(self._number * self._n + sequence, text)
        if self._has_ids:
            choice |= ids_of_piece(response)
        if self._form is not None:
            entries = logprob_forms.parse(response.text("logprobs"))
            choice["logprobs"] = logprob_forms.completion_logprobs(entries, self._form, self._offsets[sequence])
            self._offsets[sequence] += len(text)
        choice |= {"finish_reason": finish_reason(reason) if reason else None, **timed_out(reason)}
        if reason:
            choice |= stop_reason(self._answer.request, response)
        return event({**self._answer.head, "choices": [choice]})

    def _without_output(self, response: Response, sequence: int) -> bytes:
        """Drop the one token that the engine generates for max_tokens=0."""
        choice = _choice(self._number * self._n + sequence, "")
        if self._has_ids:
            choice |= {**ids_of_piece(response), "token_ids": []}
        if self._form is not None:
            choice["logprobs"] = logprob_forms.completion_logprobs([], self._form)
        return event({**self._answer.head, "choices": [{**choice, "finish_reason": "length"}]})

    def end(self) -> bytes:
        return b""


def _choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}
