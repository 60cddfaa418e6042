"""The engine as a library: text or token ids in, completions out, no server. What tests and benchmarks drive.

The thread that waits for an answer runs the engine's steps, under a lock, and routes outputs to their requests; so any
number of threads may generate and stream at once, and the library starts no thread of its own; for a model of several
ranks there is one that loads and steps (own_thread.py), so that who waits for it learns of a lost rank.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from slipstream.core.config import EngineConfig
from slipstream.core.config_checks import unused_options
from slipstream.core.config_parse import config_from_values
from slipstream.core.control import RELOAD, SLEEP, WAKE_UP, Control
from slipstream.core.errors import CapacityError, RequestError, SlipstreamError
from slipstream.core.outputs import RequestOutput, TokenLogprobs
from slipstream.core.prefix import salted_key
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.output_processor import OutputProcessor
from slipstream.engine.own_thread import OwnThread
from slipstream.engine.prompt_forms import Message, Prompt, ReadPrompt, read_conversations, read_prompt, read_prompts
from slipstream.engine.ranks import Ranks
from slipstream.nn.checkpoint_path import resolve_checkpoint
from slipstream.protocol.prompts import encode_prompt
from slipstream.protocol.request_parser import ClientRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Params = SamplingParams | Sequence[SamplingParams]
_CLOSE_S = 5.0  # for a call that was given up to end after all


@dataclass
class Completion:
    """One sequence of one prompt. finish_reason: stop, length, cancelled, timeout or error (then `error` says why).

    token_ids: all sampled ones, the one that ended the text included. logprobs: one entry per token, if asked for.
    cumulative_logprob: their sum; of a beam search also without them.
    """

    prompt_index: int
    sequence_index: int
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cumulative_logprob: float | None = None
    num_cached_tokens: int = 0
    error: str = ""

    def add(self, output: RequestOutput) -> None:
        """Take in the next piece of news."""
        self.text += output.text
        self.token_ids += output.token_ids
        if output.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *output.logprobs]
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason is not None:
            request = output.request
            self.finish_reason, self.stop_reason = output.finish_reason.value, output.stop_reason
            if self.logprobs is not None:
                self.cumulative_logprob = sum(entry.logprob for entry in self.logprobs)
            elif request.params.beam_width > 1:
                self.cumulative_logprob = request.cumulative_logprob
            self.num_cached_tokens = request.num_cached_tokens
            self.error = output.error


class LLM:
    """`LLM("path/or/hub-id").generate("def add(")`. Keyword arguments are the parameters of config.pbtxt, by name.

    Raises ConfigError as a load in the server would. Close it, or use it as a context manager, to free its memory.
    """

    def __init__(self, model: str, **parameters: object) -> None:
        self._start(config_from_values({"model": str(model), **parameters}))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        for told in unused_options(config):
            logger.warning("%s", told)
        self._thread = OwnThread() if config.parallel.num_ranks > 1 else None
        self.engine = Engine(config) if self._thread is None else _load(config, self._thread)
        self.config = self.engine.config
        engine = self.engine
        give_memory = engine.request_memory.give
        self._outputs = OutputProcessor(engine.tokenizer, engine.finish, engine.cancel, give_memory)
        self._pending: dict[int, _Pending] = {}
        self._handles = itertools.count(1)
        self._lock = threading.Lock()

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: Params | None = None, *, sampling_params: Params | None = None
    ) -> list[Completion]:
        """Complete every prompt in one in-flight batch; n completions per prompt, in order of prompt and sequence.

        prompts: text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`, which may have a `cache_salt`; or
        a list of these. params: one for all, or one per prompt; without any, `default_params`. sampling_params: vLLM's
        name of it. Raises RequestError if a prompt cannot be served (none is then), EngineError if the engine fails.
        """
        read = read_prompts(prompts)
        each = self._params_of(len(read), params, sampling_params)
        requests = [self._request(prompt, wanted) for prompt, wanted in zip(read, each)]
        handles: list[int] = []
        try:
            for request in requests:
                handles.append(self._submit_in_turn(request))
            completions: list[Completion] = []
            for index, (request, handle) in enumerate(zip(requests, handles)):
                completions += _collect(index, request.prompt_token_ids, request.params.n, self._follow(handle))
        finally:
            self._forget(handles)
        return completions

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """The pieces of one prompt's completion(s) as they are made. Leaving the loop cancels the request."""
        [wanted] = self._params_of(1, params, sampling_params)
        handle = self._submit(self._request(read_prompt(prompt), wanted), stream=True)
        try:
            yield from self._follow(handle)
        finally:
            self._forget([handle])

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """Answer one conversation, or several, written as the checkpoint's chat template says.

        content: text, or text parts as OpenAI has them. tools: functions in OpenAI's form, which the template shows;
        calls stay in the text. chat_template_kwargs: for the template, such as `enable_thinking`, and
        `add_generation_prompt` (True) and `continue_final_message` (False).
        """
        options = {"tools": tools and list(tools), "add_generation_prompt": True, **(chat_template_kwargs or {})}
        prompts = [self._encode_chat(conversation, options) for conversation in read_conversations(messages)]
        return self.generate(prompts, params, sampling_params=sampling_params)

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the KV cache and, on a GPU, of the weights: level 1 keeps them in host memory, 2 nowhere.
        Until `wake_up` requests raise CapacityError."""
        self._carry_out(Control(SLEEP, level))

    def wake_up(self) -> None:
        self._carry_out(Control(WAKE_UP))

    def reload_weights(self, model: str = "") -> None:
        """Serve other weights of the same architecture and sizes, or those of the same folder as it is now."""
        self._carry_out(Control(RELOAD, folder=model))

    @property
    def default_params(self) -> SamplingParams:
        """The settings' defaults, changed by the checkpoint's generation_config.json."""
        return SamplingParams(**dict(self.config.serving.generation_defaults))

    def close(self) -> None:
        if self._thread is None:
            self.engine.close()
        else:
            parallel = self.config.parallel  # a rank of another node may be kept from ending: calls to it time out
            self._thread.close(self.engine.close, parallel.rank_timeout_s if parallel.num_nodes > 1 else _CLOSE_S)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ---- parts

    def _carry_out(self, control: Control) -> None:
        order = self.engine.post(control)
        while not order.done.is_set():
            with self._lock:
                self._advance()
        order.wait()

    def _params_of(self, count: int, params: Params | None, same: Params | None) -> list[SamplingParams]:
        """One for each of `count` prompts. same: the same argument by vLLM's name."""
        if params is not None and same is not None:
            raise RequestError("sampling_params", "given beside params, accepted: one of them")
        given = params if params is not None else same
        each = list(given) if isinstance(given, Sequence) else [given or self.default_params] * count
        for wanted in each:
            if not isinstance(wanted, SamplingParams):
                told = "accepted: slipstream.SamplingParams, or a list of one per prompt"
                raise RequestError("params", f"got {type(wanted).__name__}, {told}")
        if len(each) != count:
            raise RequestError("params", f"{len(each)} for {count} prompts")
        return each

    def _request(self, prompt: ReadPrompt, params: SamplingParams) -> Request:
        params.check_max_logprobs(self.config.serving.max_logprobs)
        token_ids = prompt.value if not isinstance(prompt.value, str) else self._encode(prompt.value)
        return Request(token_ids, params, prefix_key=salted_key(prompt.cache_salt))

    def _encode(self, text: str) -> list[int]:
        add_special_tokens, max_model_len = self.config.serving.add_special_tokens, self.engine.max_model_len
        return encode_prompt("prompt", text, self.engine.tokenizer, add_special_tokens, max_model_len)

    def _encode_chat(self, conversation: list[dict[str, Any]], options: Mapping[str, Any]) -> list[int]:
        if self._chat_tokenizer.chat_template is None:
            raise RequestError("messages", "the checkpoint has no chat template")
        text = self._chat_tokenizer.apply_chat_template(conversation, tokenize=False, **options)
        return self.engine.tokenizer.encode(str(text), add_special_tokens=False)  # the template writes them itself

    @cached_property
    def _chat_tokenizer(self) -> PreTrainedTokenizerBase:
        """Used for its chat template only; self.engine.tokenizer encodes the text."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.config.model.tokenizer or resolve_checkpoint(self.config.model.model))

    def _submit_in_turn(self, request: Request) -> int:
        """Submit; while the engine is full, let it work. Raises CapacityError only if waiting cannot help."""
        while True:
            try:
                return self._submit(request, stream=False)
            except CapacityError:
                if not self.engine.has_work:
                    raise
            with self._lock:
                self._advance()

    def _submit(self, request: Request, stream: bool) -> int:
        handle = request.handle = next(self._handles)
        self._pending[handle] = _Pending()
        self._outputs.add(ClientRequest(handle, request, stream=stream))
        try:
            self.engine.submit(request)
        except SlipstreamError:
            self._outputs.discard(handle)
            del self._pending[handle]
            raise
        return handle

    def _follow(self, handle: int) -> Iterator[RequestOutput]:
        """Outputs of one request until its last, running the engine while there are none."""
        pending = self._pending[handle]
        while not pending.is_done or pending.outputs:
            while pending.outputs:
                yield pending.outputs.popleft()
            with self._lock:
                if not pending.is_done and not pending.outputs:
                    if self.engine.error is not None:
                        raise self.engine.error
                    self._advance()
        if self.engine.error is not None:
            raise self.engine.error

    def _advance(self) -> None:
        outputs = self.engine.step() if self._thread is None else self._thread.run(self.engine.step)
        for output in self._outputs.process(outputs):
            pending = self._pending.get(output.request.handle)
            if pending is not None:
                pending.outputs.append(output)
                pending.is_done = pending.is_done or output.is_final

    def _forget(self, handles: list[int]) -> None:
        """Drop requests; those that have not ended are cancelled. Their blocks are free once this returns, also those
        of sequences that a stop string has ended just now."""
        for handle in handles:
            self._outputs.discard(handle)
            if not self._pending.pop(handle).is_done:
                self.engine.cancel(handle)
        with self._lock:
            if self.engine.has_work:
                self._advance()


@dataclass(slots=True)
class _Pending:
    """A request in flight: outputs not fetched yet; is_done: the last one is or was among them."""

    outputs: deque[RequestOutput] = field(default_factory=deque)
    is_done: bool = False


def _load(config: EngineConfig, thread: OwnThread) -> Engine:
    """An engine of several ranks, whose calls are the thread's, which ends if this raises."""
    ranks = None
    try:
        ranks = Ranks(config.parallel, end_load=thread.give_up)
        return thread.run(lambda: Engine(config, ranks=ranks))
    except BaseException:  # also of a signal here, after which the load shall not go on
        if ranks is not None:
            ranks.kill()
        thread.close(lambda: None, 0.0)
        raise


def _collect(index: int, prompt: list[int], n: int, outputs: Iterator[RequestOutput]) -> list[Completion]:
    completions = [Completion(index, sequence, prompt) for sequence in range(n)]
    for output in outputs:
        completions[output.request.sequence_index].add(output)
    return completions
