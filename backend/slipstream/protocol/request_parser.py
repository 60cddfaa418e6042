"""Parse a request: wire request -> `ClientRequest`, whose `request` goes to the engine.

Standard library only, no state; runs on the input thread. Raises RequestError for everything that is wrong with a
request, so that it never reaches the scheduler. docs/contracts.md has the tensors and the order of precedence.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from slipstream.core.config import EngineConfig
from slipstream.core.control import LIST_LORA, OF_LORA, Control
from slipstream.core.errors import RequestError
from slipstream.core.prefix import salted_key
from slipstream.core.request import Request, RequestTimes
from slipstream.core.request_memory import logprob_bytes
from slipstream.core.sampling_params import FIELD_NAMES, SamplingParams
from slipstream.core.setting_values import refuse
from slipstream.core.settings import BY_NAME, DEFAULTS
from slipstream.core.trace_context import trace_parameters
from slipstream.core.wire_messages import Request as WireRequest
from slipstream.protocol.adapters import read_sent_adapter
from slipstream.protocol.client_settings import Settings, read_settings, unknown
from slipstream.protocol.contract_generate import OUTPUTS
from slipstream.protocol.prompts import TextCodec, encode_reference, read_prompt
from slipstream.protocol.structured_output import read_guide

_OUTPUTS = {spec.name: spec for spec in OUTPUTS}
_NEED_LOGPROBS = frozenset({"logprobs", "cumulative_logprob", "cum_log_probs", "output_log_probs"})
_LOGPROB_FLAGS = ("return_log_probs", "return_logprobs", "return_cumulative_logprob")
_FIELDS = frozenset(FIELD_NAMES)
_BIASES = ("logit_bias", "embedding_bias_words", "embedding_bias_weights")
_NOT_DECOUPLED = (
    "because the model_transaction_policy of config.pbtxt is `decoupled: false`: a request has one response"
)
STOP_IS_OFF = "got True, accepted: False (the model has stop_by_request_id off); cancel the request's stream instead"
STREAM_ECHO = "When streaming, `exclude_input_in_output` = False is not allowed."  # the vLLM backend's words


@dataclass(slots=True, eq=False)
class ClientRequest:
    """A parsed request, and how to answer it.

    handle: the server's number of the request. request_id: the client's name for it, may be "".

    request: ready for Engine.submit; its params.n sequences answer under one handle. None when is_stop or control.
    is_stop: this is no generation; it stops the running request that has this request_id. control: nor is this.
    echo_text: the prompt, if the output starts with it, else "".
    outputs: names of the output tensors to send; is_text_only: text_output alone, without batch dimension.
    has_batch_dim: the model has max_batch_size > 0, so every tensor's first dimension is the batch (1).
    token_text: the text of one token, for log-probabilities. trace_parameters: which trace it
    belongs to, as sent.
    """

    handle: int
    request: Request | None
    request_id: str = ""
    is_stop: bool = False
    control: Control | None = None
    stream: bool = False
    stream_interval: int = 1
    echo_text: str = ""
    outputs: tuple[str, ...] = ("text_output",)
    has_batch_dim: bool = False
    is_text_only: bool = True
    wants_context: bool = False
    token_text: Callable[[int], str] = str
    trace_parameters: Mapping[str, object] = field(default_factory=dict)


def parse_request(raw: WireRequest, config: EngineConfig, tokenizer: TextCodec) -> ClientRequest:
    """Raises RequestError that names the setting, its value and what is accepted."""
    has_batch_dim = config.serving.max_batch_size > 0
    settings = read_settings(raw, has_batch_dim, config.serving.ignored_request_parameters)
    settle_beams(settings)
    request_id = raw.request_id or settings.get("request_id", "")
    outputs = read_outputs(raw, settings)
    if settings.get("stop_request"):
        if not config.serving.stop_by_request_id:
            raise RequestError("stop", STOP_IS_OFF)
        return _stop_request(raw.handle, request_id, outputs, has_batch_dim)
    if settings.get("control"):
        control = _control(settings, config)
        return ClientRequest(raw.handle, None, control=control, outputs=_text_of(outputs), has_batch_dim=has_batch_dim)
    if settings.get("lora_path"):
        raise refuse("lora_path", settings["lora_path"], "nothing in a request: its adapter is loaded before")
    stream: bool = settings.get("stream", DEFAULTS["stream"])
    if not config.serving.is_decoupled:
        check_one_response(settings, has_batch_dim or "context_ids" in outputs)
    params = _sampling_params(settings, config, outputs, tokenizer)
    token_ids, text = read_prompt(settings, config, tokenizer, params.max_tokens)
    echo_text = ""
    if _is_echoed(settings, stream, config):
        echo_text = text if text is not None else tokenizer.decode(token_ids, params.skip_special_tokens)
    stream_interval: int = settings.get("stream_interval", config.serving.stream_interval)
    params.check_max_logprobs(config.serving.max_logprobs, settings.spelled)
    num_together = stream_interval if stream and params.beam_width <= 1 else 0  # a beam search has its text at the end
    entries = _response_entries(params, len(token_ids), bool(echo_text), num_together, config, tokenizer)
    entries.check(config.serving.max_response_entries)
    request = Request(
        token_ids,
        params,
        priority=settings.get("priority", DEFAULTS["priority"]),
        deadline=read_deadline(raw, settings),
        handle=raw.handle,
        request_id=request_id,
        prefix_key=salted_key(settings.get("cache_salt", "")),
        adapter_name=settings.get("lora_name", ""),
        sent_adapter=read_sent_adapter(settings),
        prompt_table=settings.get("prompt_table"),
        prompt_table_size=settings.get("prompt_table_size", 0),
        num_echo_bytes=sys.getsizeof(echo_text) if echo_text else 0,
        num_logprob_bytes=entries.logprob_bytes,
        num_prompt_logprob_bytes=entries.prompt_logprob_bytes,
        times=RequestTimes(arrival_ns=raw.arrival_ns),
    )
    return ClientRequest(
        raw.handle,
        request,
        request_id=request_id,
        stream=stream,
        stream_interval=stream_interval,
        echo_text=echo_text,
        outputs=outputs,
        has_batch_dim=has_batch_dim,
        is_text_only=outputs == ("text_output",) and not has_batch_dim,
        wants_context="context_ids" in outputs,
        token_text=tokenizer.token_text,
        trace_parameters=trace_parameters(raw.parameters),
    )


def check_one_response(settings: Settings, is_response_per_sequence: bool) -> None:
    """Raises RequestError for what has several responses, which Triton takes from decoupled models alone."""
    if settings.get("stream", DEFAULTS["stream"]):
        raise RequestError("stream", f"got True, accepted: False, {_NOT_DECOUPLED}")
    if is_response_per_sequence and settings.get("n", 1) != 1:
        raise refuse("num_return_sequences", settings["n"], f"1, {_NOT_DECOUPLED}")


@dataclass(frozen=True, slots=True)
class _ResponseEntries:
    """The tokens that one response has, and their alternatives. num_logprobs, num_prompt_logprobs: alternatives of a
    token; None without log-probabilities."""

    params: SamplingParams
    num_prompt: int
    num_new: int
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    is_echoed: bool

    def check(self, limit: int) -> None:
        """Raises RequestError if they are more than max_response_entries."""
        n, num_prompt, num_new = self.params.n, self.num_prompt, self.num_new
        logprobs, prompt_logprobs = self.num_logprobs or 0, self.num_prompt_logprobs
        num_echoed = n * num_prompt if self.is_echoed else 0
        num_of_prompt = num_prompt * (1 + prompt_logprobs) if prompt_logprobs is not None else 0
        total = n * num_new * (1 + logprobs) + num_echoed + num_of_prompt
        if total <= limit:
            return
        terms = f"n={n} x {num_new} tokens x (1 + logprobs={logprobs})"
        if num_echoed:
            terms += f" + n={n} x {num_prompt} echoed tokens"
        if num_of_prompt:
            terms += f" + {num_prompt} prompt tokens x (1 + prompt_logprobs={prompt_logprobs})"
        stream = "" if self.params.beam_width > 1 else ", or stream"
        accepted = f"at most max_response_entries={limit}; ask for less{stream}"
        raise RequestError("max_tokens", f"one response would hold {terms} = {total} entries, accepted: {accepted}")

    @property
    def logprob_bytes(self) -> int:
        """Host bytes of its tokens' log-probabilities until they are sent."""
        return 0 if self.num_logprobs is None else logprob_bytes(self.params.n * self.num_new, self.num_logprobs)

    @property
    def prompt_logprob_bytes(self) -> int:
        return 0 if self.num_prompt_logprobs is None else logprob_bytes(self.num_prompt, self.num_prompt_logprobs)


def _response_entries(
    params: SamplingParams,
    num_prompt: int,
    is_echoed: bool,
    num_together: int,
    config: EngineConfig,
    tokenizer: TextCodec,
) -> _ResponseEntries:
    """num_together: tokens per response; 0 = all in one."""
    vocab_size, max_model_len = tokenizer.vocab_size, config.model.max_model_len
    logprobs, prompt_logprobs = (vocab_size if k == -1 else k for k in (params.logprobs, params.prompt_logprobs))
    num_new = min(params.max_tokens, max(0, max_model_len - num_prompt)) if max_model_len else params.max_tokens
    num_new = min(num_new, num_together) if num_together else num_new
    if logprobs is not None:
        logprobs += len(params.logprob_token_ids)
    return _ResponseEntries(params, num_prompt, num_new, logprobs, prompt_logprobs, is_echoed)


def _stop_request(handle: int, request_id: str, outputs: tuple[str, ...], has_batch_dim: bool) -> ClientRequest:
    if not request_id:
        raise RequestError("stop", "needs a request id: that of the running request which is to stop")
    text = _text_of(outputs)
    return ClientRequest(handle, None, request_id=request_id, is_stop=True, outputs=text, has_batch_dim=has_batch_dim)


def _control(settings: Settings, config: EngineConfig) -> Control:
    command = settings["control"]
    if command in OF_LORA:
        if not config.model.enable_lora or not (config.model.lora_root or command == LIST_LORA):
            raise refuse("control", command, "it of models with enable_lora and lora_root")
        if command != LIST_LORA and not settings.get("lora_name"):
            raise refuse("lora_name", "", "the adapter's name")
        return Control(command, folder=settings.get("lora_path", ""), name=settings.get("lora_name", ""))
    if not config.serving.enable_sleep_mode:
        raise refuse("control", command, "nothing: the model has enable_sleep_mode off")
    of_control = {name: settings.get(name) or DEFAULTS[name] for name in ("sleep_level", "sleep_mode", "reload_folder")}
    return Control(settings["control"], *of_control.values())


def _text_of(outputs: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in outputs if name == "text_output")


def _is_echoed(settings: Settings, stream: bool, config: EngineConfig) -> bool:
    excluded = settings.get("exclude_input_in_output")
    if excluded is not None:
        if stream and not excluded:
            raise RequestError("exclude_input_in_output", STREAM_ECHO)
        return not excluded
    by_default = config.serving.exclude_input_in_output
    return not (stream or by_default)


def read_deadline(raw: WireRequest, settings: Settings) -> float | None:
    """The earlier of Triton's request timeout and `timeout_ms`, counted from arrival, as time.monotonic() seconds."""
    given = settings.get("timeout_us", 0) / 1e6, settings.get("timeout_ms", 0) / 1e3
    timeouts = [seconds for seconds in (raw.timeout_us / 1e6, *given) if seconds > 0]
    if not timeouts:
        return None
    elapsed = max(0.0, (time.time_ns() - raw.arrival_ns) / 1e9) if raw.arrival_ns else 0.0
    return time.monotonic() - elapsed + min(timeouts)


# ---------------------------------------------------------------- outputs


def settle_beams(settings: Settings) -> None:
    """Say as `n` and `beam_width` how many sequences a beam search returns: vLLM's has n beams, TensorRT-LLM's
    returns all of beam_width unless told otherwise."""
    width, n = settings.get("beam_width", 0), settings.get("n", 1)
    if settings.pop("use_beam_search", False):
        width = max(width, n)
        if width == 1:
            settings["temperature"] = 0.0  # the search of one beam takes the likeliest token
    if width > 1:
        settings["beam_width"], settings["n"] = width, settings.get("n", width)


def read_outputs(raw: WireRequest, settings: Settings) -> tuple[str, ...]:
    flags = frozenset(name for name, value in settings.items() if value is True and name.startswith("return_"))
    if "prompt_token_ids" in settings:  # TensorRT-LLM's core model answers token ids with token ids
        flags |= {"return_output_ids"}
    return select_outputs(raw.requested_outputs, flags)


@lru_cache(maxsize=256)
def select_outputs(requested: tuple[str, ...], flags: frozenset[str]) -> tuple[str, ...]:
    """Names of the outputs to send. A client that names outputs gets exactly those. If it names none, Triton reports
    all of them; it then gets text_output and what its return_* flags ask for. Raises RequestError for an unknown name.
    """
    for name in requested:
        if name not in _OUTPUTS:
            raise unknown(name, "output", _OUTPUTS)
    if not requested or len(set(requested)) == len(_OUTPUTS):
        return tuple(spec.name for spec in OUTPUTS if spec.name == "text_output" or spec.flag in flags)
    return tuple(spec.name for spec in OUTPUTS if spec.name in requested)


# ---------------------------------------------------------------- sampling parameters


def _sampling_params(
    settings: Settings, config: EngineConfig, outputs: tuple[str, ...], tokenizer: TextCodec
) -> SamplingParams:
    serving = config.serving
    fields: dict[str, Any] = {"max_tokens": serving.default_max_tokens}
    fields["skip_special_tokens"] = serving.skip_special_tokens
    if not ({"top_k", "top_p"} & settings.keys()):
        fields["temperature"] = serving.default_temperature
    fields.update(serving.generation_defaults)
    fields.update({name: value for name, value in settings.items() if name in _FIELDS})
    n = fields.get("n", 1)
    if settings.get("best_of", n) not in (1, n):
        raise refuse(settings.spelled("best_of"), settings["best_of"], f"n={n}: every sequence made is returned")
    if "logprobs" not in fields and _asks_for_logprobs(settings, outputs):
        fields["logprobs"] = 0
    if "prompt_logprobs" not in fields and "prompt_logprobs" in outputs:
        fields["prompt_logprobs"] = 0
    if not settings.keys().isdisjoint(_BIASES):
        fields["logit_bias"] = _logit_bias(settings, tokenizer)
    if not any(fields.get("embedding_bias", ())):
        fields["embedding_bias"] = ()
    fields["guide"] = read_guide(settings)
    fields["reference_ids"] = _reference_ids(settings, config, tokenizer)
    return SamplingParams(**fields, are_checked=True)


def _asks_for_logprobs(settings: Settings, outputs: tuple[str, ...]) -> bool:
    """Whether an output or a flag needs log-probabilities.

    A step of an ensemble names every output that the ensemble may send. There only the flags count, as with
    TensorRT-LLM: log-probabilities for every request would slow all of them down. Triton does not mark such a request;
    it is recognised by its outputs, request_handle without text_output.
    """
    if "request_handle" in outputs and "text_output" not in outputs:
        return any(settings.get(flag, False) for flag in _LOGPROB_FLAGS)
    return not _NEED_LOGPROBS.isdisjoint(outputs)


def _logit_bias(settings: Settings, tokenizer: TextCodec) -> tuple[tuple[int, float], ...]:
    """(token id, bias) pairs: the sum of logit_bias and embedding_bias_words for each token."""
    total: dict[int, float] = {}
    pairs = list(settings.get("logit_bias", ()))
    words, weights = settings.get("embedding_bias_words", ()), settings.get("embedding_bias_weights", ())
    if len(words) != len(weights):
        raise refuse("embedding_bias_weights", list(weights), f"one number per word, {len(words)} in all")
    for token_ids, weight in zip(tokenizer.encode_all(words), weights):
        pairs += [(token_id, weight) for token_id in token_ids]
    for token_id, bias in pairs:
        total[token_id] = total.get(token_id, 0.0) + bias
    if len(total) < len(pairs):  # the sum of two biases may exceed the bound of one
        BY_NAME["logit_bias"].kind.check("logit_bias", tuple(total.items()))
    return tuple(total.items())


def _reference_ids(settings: Settings, config: EngineConfig, tokenizer: TextCodec) -> tuple[int, ...]:
    """Token ids of the reference, cut to max_model_len."""
    text, token_ids = settings.get("reference_text", ""), settings.get("reference_ids", ())
    if text and token_ids:
        raise RequestError("reference_text", "given together with reference_ids, accepted: one of them")
    if text:
        token_ids = tuple(encode_reference(text, tokenizer, config.model.max_model_len))
    most = config.model.max_model_len or len(token_ids)
    return tuple(token_ids[:most])
