"""Outputs of the engine: plain dataclasses passed from the engine thread to the output thread to the wire or `LLM`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.core.errors import EngineError, SlipstreamError
from slipstream.core.request import FinishReason, Request


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities of one position. top: (token id, logprob), likeliest first. rank of the chosen token: 1 = best.

    asked: likewise of the request's logprob_token_ids. json: their encoding for clients (protocol/responses.py); once
    it is set, both lists are empty. logits: of all tokens, fp32, if the request wants them.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)
    asked: list[tuple[int, float]] = field(default_factory=list)
    json: bytes = b""
    logits: bytes = b""


@dataclass(slots=True)
class StepOutput:
    """One request's output of one engine step, as token ids. finish_reason is set on the last one.

    prompt_logprobs: one entry per prompt token, the first None; set once, with the first output token, as are
    context_logits: of all tokens, fp32, a row per prompt token.
    """

    request: Request
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    context_logits: list[bytes] | None = None
    error: str = ""  # set with FinishReason.ERROR
    fault: type[SlipstreamError] = EngineError  # the kind of error


@dataclass(slots=True)
class DecodedTokens:
    """What a step has drawn for requests that decode, in columns: an object for each takes 0.2 us of the engine thread.

    token_ids: of each request. ended: finish reasons by index, of the requests that they end: a request's own changes
    once more if the engine dies before somebody looks.
    """

    requests: Sequence[Request]
    token_ids: Sequence[list[int]]
    ended: Mapping[int, FinishReason] = field(default_factory=dict)
    _outputs: list[StepOutput] | None = None

    def outputs(self) -> list[StepOutput]:
        """The same in objects, which are made once."""
        if self._outputs is None:
            self._outputs = list(map(StepOutput, self.requests, self.token_ids))
            for index, reason in self.ended.items():
                self._outputs[index].finish_reason = reason
        return self._outputs


class StepOutputs:
    """The outputs of one engine step, in order. Columns become objects when somebody looks at each, as a rule on the
    output thread."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Iterable[StepOutput | DecodedTokens] = ()) -> None:
        self._parts = list(parts)

    def append(self, output: StepOutput) -> None:
        self._parts.append(output)

    def __iadd__(self, others: StepOutputs | Iterable[StepOutput]) -> StepOutputs:
        self._parts += others._parts if isinstance(others, StepOutputs) else others
        return self

    def __iter__(self) -> Iterator[StepOutput]:
        for part in self._parts:
            if isinstance(part, DecodedTokens):
                yield from part.outputs()
            else:
                yield part

    def __bool__(self) -> bool:
        return bool(self._parts)

    def ended(self) -> list[Request]:
        """The requests that they end."""
        found: list[Request] = []
        for part in self._parts:
            if isinstance(part, DecodedTokens):
                found += [part.requests[index] for index in part.ended]
            elif part.finish_reason is not None:
                found.append(part.request)
        return found


@dataclass(slots=True)
class RequestOutput:
    """Output of one sequence of a client request, as text: a delta when streaming, everything otherwise.

    context_token_ids: the tokens that a stateless decoder needs before token_ids:
    decode(context + token_ids) minus decode(context) is exactly `text`.
    With an echoed prompt there is no context and `text` decodes prompt + token_ids.
    cumulative_logprob: sum over the sequence's tokens so far.
    is_first: the first output of the sequence. is_final: the last of the client request, over all its sequences.
    """

    request: Request
    text: str
    token_ids: list[int]
    context_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    context_logits: list[bytes] | None = None
    is_first: bool = False
    is_final: bool = False
    error: str = ""
    fault: type[SlipstreamError] = EngineError
    cumulative_logprob: float = 0.0
