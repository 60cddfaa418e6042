"""What leaves the engine: plain dataclasses that cross from engine thread to output thread to the wire or to `LLM`."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.core.errors import EngineError, SlipstreamError
from slipstream.core.request import FinishReason, Request


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities of one position. top: (token id, logprob), likeliest first. rank of the chosen: 1 = best.

    json: the same as clients read it, once it has been written (core/responses.py); top is empty from then on.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)
    json: str = ""


@dataclass(slots=True)
class StepOutput:
    """One request's news of one engine step, as token ids. finish_reason is set on the request's last one.

    prompt_logprobs: one entry per prompt token, the first None; set once, with the first output token.
    """

    request: Request
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str = ""  # set with FinishReason.ERROR
    fault: type[SlipstreamError] = EngineError  # whose fault the error is


@dataclass(slots=True)
class RequestOutput:
    """News of one sequence of a client request, as text: a delta when streaming, everything otherwise.

    context_token_ids: the tokens before new ones that a stateless decoder must be given so that
    decode(context + token_ids) minus decode(context) is exactly `text`.
    With an echoed prompt there is no context and `text` is that of prompt + token_ids.
    cumulative_logprob: of the sequence's tokens up to and including these.
    is_final: no later output of the same client request (handle) follows, whatever the sequence.
    """

    request: Request
    text: str
    token_ids: list[int]
    context_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    is_final: bool = False
    error: str = ""
    fault: type[SlipstreamError] = EngineError
    cumulative_logprob: float = 0.0
