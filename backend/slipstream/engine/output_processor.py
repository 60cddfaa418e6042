"""Turns the engine's token ids into client outputs: text, stop strings, coalescing, the end of n sequences.

Belongs to the output thread; only `add` and `discard` may be called from others. Knows nothing of sockets or tensors:
`protocol/responses.py` turns a RequestOutput into bytes. Target: 12 us per token of a simple stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from typing import NamedTuple

from slipstream.core.outputs import RequestOutput, StepOutput, TokenLogprobs
from slipstream.core.request import FinishReason, Request
from slipstream.protocol.request_parser import ClientRequest
from slipstream.protocol.responses import write_logprobs
from slipstream.tokenizer.detokenizer import (
    IncrementalDetokenizer,
    NoDetokenizer,
    Tokenizer,
    context_token_ids,
    start_detokenizer,
)
from slipstream.tokenizer.stop_strings import StopMatcher

OnStop = Callable[[Request, str], None]
OnHandle = Callable[[int], None]


class OutputProcessor:
    """Every client request in flight, by handle. on_stop(request, stop string) asks the engine to end a sequence.

    on_failure(handle) asks it to end the other sequences of a request after one has failed. on_end(handle): a request
    has had its last output, or has been discarded.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        on_stop: OnStop,
        on_failure: OnHandle,
        on_end: OnHandle = lambda handle: None,
    ) -> None:
        self._tokenizer = tokenizer
        self._on_stop = on_stop
        self._on_failure, self._on_end = on_failure, on_end
        self._clients: dict[int, _Client] = {}

    def add(self, client: ClientRequest) -> None:
        """Expect outputs of this request. Call before Engine.submit, from any thread."""
        self._clients[client.handle] = _Client(client)

    def discard(self, handle: int) -> None:
        """Drop a request and its further outputs. Any thread; an unknown handle is ignored."""
        self._clients.pop(handle, None)
        self._on_end(handle)

    @property
    def num_requests(self) -> int:
        return len(self._clients)

    def process(self, step_outputs: Iterable[StepOutput]) -> list[RequestOutput]:
        """The outputs of one engine step as text, in the same order; sequences without decided text have none."""
        outputs = []
        for step in step_outputs:
            client = self._clients.get(step.request.handle)
            if client is None:
                continue
            sequence = client.sequences.get(step.request.sequence_index)
            if sequence is None:
                sequence = self._start(client, step.request)
            if sequence.is_done:
                continue
            output = sequence.take(step)
            if output is not None:
                outputs.append(output)
                if output.finish_reason is not None:
                    self._finish(client, sequence, output)
        return outputs

    def _start(self, client: _Client, request: Request) -> _Sequence:
        sequence = _Sequence(self._tokenizer, client.start(self._tokenizer, request), client.client, request)
        client.sequences[request.sequence_index] = sequence
        return sequence

    def _finish(self, client: _Client, sequence: _Sequence, output: RequestOutput) -> None:
        client.num_unfinished -= 1
        output.is_final = client.num_unfinished == 0 or output.finish_reason is FinishReason.ERROR
        if output.is_final:
            self.discard(output.request.handle)
            if client.num_unfinished:
                self._on_failure(output.request.handle)
        if sequence.stopped_by is not None:
            self._on_stop(output.request, sequence.stopped_by)


class _Start(NamedTuple):
    """Detokenizer state at the end of a prompt. context: the prompt tokens that a stateless decoder needs."""

    detokenizer: IncrementalDetokenizer
    context: list[int]


def _detokenizer(tokenizer: Tokenizer, request: Request) -> IncrementalDetokenizer:
    params = request.params
    if not params.detokenize:
        return NoDetokenizer()
    return start_detokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens)


class _Client:
    __slots__ = ("_start", "client", "num_unfinished", "sequences")

    def __init__(self, client: ClientRequest) -> None:
        self.client = client
        self._start: _Start | None = None
        self.sequences: dict[int, _Sequence] = {}
        assert client.request is not None, "only what generates has outputs"
        self.num_unfinished = client.request.params.n

    def start(self, tokenizer: Tokenizer, request: Request) -> _Start:
        """The state for one of the n sequences: copies of one, so that a long prompt is read once."""
        if self._start is None:
            prompt, skip_special_tokens = request.prompt_token_ids, request.params.skip_special_tokens
            context: list[int] = []
            if self.client.wants_context and not self.client.echo_text:
                context = context_token_ids(tokenizer, prompt, skip_special_tokens)
            self._start = _Start(_detokenizer(tokenizer, request), context)
        if self.num_unfinished == 1:
            return self._start
        return _Start(copy(self._start.detokenizer), self._start.context)


class _Sequence:
    """One sequence's text. A token is sent when all of its text is decided: it has no incomplete character and cannot
    be part of a stop string. Its log-probabilities are sent with it."""

    def __init__(self, tokenizer: Tokenizer, start: _Start, client: ClientRequest, request: Request) -> None:
        params = request.params
        self._tokenizer = tokenizer
        self._client = client
        self._request = request
        self._detokenizer, self._context = start
        self._matcher: StopMatcher | None = None
        if params.stop:
            self._matcher = StopMatcher(params.stop, params.stop_automaton, params.include_stop_str_in_output)
        self._num_tokens = 0  # looked through for stop strings, also those not sent
        self._has_sent = False
        self._interval = client.stream_interval if client.stream else 0  # 0: everything at the end
        self._texts: list[str] = []  # decided, not sent, of these tokens; `text +=` would copy all of it for each token
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._cumulative_logprob = 0.0
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._context_logits: list[bytes] | None = None
        self._decided = ""  # decided text of tokens that are still held
        self._held: list[tuple[int, int, TokenLogprobs | None]] = []  # token id, length of its text, log-probabilities
        self.is_done = False
        self.stopped_by: str | None = None

    def take(self, step: StepOutput) -> RequestOutput | None:
        """Add one step's tokens. Returns the output that is due, or None. The caller sets is_final."""
        if step.prompt_logprobs is not None:
            self._prompt_logprobs, self._context_logits = step.prompt_logprobs, step.context_logits
        if step.logprobs:
            write_logprobs(self._client, step.logprobs)
        if self._matcher is not None:
            self._take_matching(step, self._matcher)
        elif step.new_token_ids:
            self._add(self._detokenizer.push(self._shown(step)))
            self._token_ids += step.new_token_ids
            if step.logprobs:
                self._logprobs += step.logprobs
        if step.finish_reason is not None or self.stopped_by is not None:
            return self._end(step)
        if self._is_due():
            return self._emit()
        return None

    def _add(self, text: str) -> None:
        if text:
            self._texts.append(text)

    def _is_due(self) -> bool:
        if not self._interval or not self._token_ids:
            return False
        if not self._texts and (self._detokenizer.is_pending or self._held):
            return False
        return not self._has_sent or len(self._token_ids) >= self._interval

    def _shown(self, step: StepOutput) -> list[int]:
        """The step's tokens without an end or stop token, which is counted but not shown."""
        if step.finish_reason is not FinishReason.STOP:
            return step.new_token_ids
        params, reason = step.request.params, step.request.stop_reason
        is_hidden = reason is None or reason in params.stop_token_ids
        if not is_hidden or params.include_stop_str_in_output:
            return step.new_token_ids
        return step.new_token_ids[:-1]

    def _take_matching(self, step: StepOutput, matcher: StopMatcher) -> None:
        num_shown = len(self._shown(step))
        for index, token_id in enumerate(step.new_token_ids):
            self._num_tokens += 1
            text = self._detokenizer.push((token_id,)) if index < num_shown else ""
            self._held.append((token_id, len(text), step.logprobs[index] if step.logprobs else None))
            self._decided += matcher.push(text, self._num_tokens > step.request.params.min_tokens)
            if matcher.matched is not None:
                self.stopped_by = matcher.matched
                return self._release_all()
            self._release()

    def _release(self) -> None:
        """Release the oldest held tokens whose text is decided."""
        num_released, at = 0, 0
        for _, length, _ in self._held:
            if at + length > len(self._decided):
                break
            at += length
            num_released += 1
        self._add(self._decided[:at])
        self._decided = self._decided[at:]
        self._let_go(num_released)

    def _release_all(self) -> None:
        self._add(self._decided)
        self._decided = ""
        self._let_go(len(self._held))

    def _let_go(self, num_tokens: int) -> None:
        for token_id, _, logprobs in self._held[:num_tokens]:
            self._token_ids.append(token_id)
            if logprobs is not None:
                self._logprobs.append(logprobs)
        del self._held[:num_tokens]

    def _end(self, step: StepOutput) -> RequestOutput:
        self.is_done = True
        matcher = self._matcher
        if matcher is None:
            self._add(self._detokenizer.flush())
        elif self.stopped_by is None:
            may_match = self._num_tokens > step.request.params.min_tokens
            self._decided += matcher.push(self._detokenizer.flush(), may_match) + matcher.flush()
            self.stopped_by = matcher.matched
            self._release_all()
        output = self._emit()
        if self.stopped_by is not None:
            output.finish_reason, output.stop_reason = FinishReason.STOP, self.stopped_by
        else:
            output.finish_reason, output.stop_reason = step.finish_reason, step.request.stop_reason
            output.error, output.fault = step.error, step.fault
        return output

    def _emit(self) -> RequestOutput:
        text, client = "".join(self._texts), self._client
        if client.echo_text and not self._has_sent:
            text = client.echo_text + text
        output = RequestOutput(self._request, text, self._token_ids, is_first=not self._has_sent)
        if self._logprobs:
            output.logprobs = self._logprobs
            self._cumulative_logprob += sum(entry.logprob for entry in self._logprobs)
            self._logprobs = []
        output.cumulative_logprob = self._cumulative_logprob
        if self._prompt_logprobs is not None:
            output.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
            output.context_logits, self._context_logits = self._context_logits, None
        if client.wants_context:
            output.context_token_ids = self._context
            params = self._request.params
            self._context = context_token_ids(
                self._tokenizer, self._context + self._token_ids, params.skip_special_tokens
            )
        self._has_sent = True
        self._texts, self._token_ids = [], []
        return output
