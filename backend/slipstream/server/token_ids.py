"""What vLLM adds to an answer for `return_token_ids`, `prompt_logprobs` and stops of the request. Pure functions."""

from __future__ import annotations

from typing import Any

from slipstream.server.catalog import Model
from slipstream.server.errors import ApiError
from slipstream.server.gateway import require_output
from slipstream.server.generation import Response
from slipstream.server.schemas import Sampling

OUTPUTS = ("output_ids", "prompt_token_ids", "num_output_tokens")
STOP_REASON = "stop_reason"
_STOPS = ("stop", "stop_token_ids")


def with_further_outputs(request: Sampling, model: Model, outputs: tuple[str, ...]) -> tuple[str, ...]:
    """With the outputs that `prompt_logprobs`, `return_token_ids` and `stop_reason` need.

    Raises ApiError for a stream with prompt_logprobs, and for a model that does not declare the outputs.
    """
    further: tuple[str, ...] = ()
    if request.prompt_logprobs is not None:
        if request.stream:
            raise ApiError(400, "prompt_logprobs: only without stream", param="prompt_logprobs")
        require_output(model, "prompt_logprobs", "prompt_logprobs", "none")
        further = ("prompt_logprobs",)
    if request.return_token_ids:
        for name in OUTPUTS:
            require_output(model, name, "return_token_ids", "false")
        further += OUTPUTS
    if has_stops(request) and STOP_REASON in model.outputs:
        further += (STOP_REASON,)
    return outputs + tuple(name for name in further if name not in outputs)


def output_ids(response: Response) -> list[list[int]]:
    """Token ids of each sequence of the response. A row has an echoed prompt in front and is padded to the longest."""
    flat, counts = response.integers("output_ids"), response.integers("num_output_tokens")
    width = len(flat) // len(counts)
    num_echoed = width - max(counts)
    rows = [flat[index * width : (index + 1) * width] for index in range(len(counts))]
    return [row[num_echoed : num_echoed + count] for row, count in zip(rows, counts)]


def ids_of_piece(response: Response) -> dict[str, Any]:
    """What a streamed choice has beside its text; the prompt's with the first."""
    prompt = response.integers("prompt_token_ids")
    return {"token_ids": output_ids(response)[0], **({"prompt_token_ids": prompt} if prompt else {})}


def has_stops(request: Sampling) -> bool:
    return any(getattr(request, name) for name in _STOPS)


def stop_reason(request: Sampling, response: Response, sequence: int = 0) -> dict[str, Any]:
    """vLLM's key beside the finish reason: the request's stop string or stop token that ended the sequence, else null.

    Nothing for a request without stops, whose reason would always be null, and for a model that does not say it.
    """
    if not has_stops(request) or STOP_REASON not in response.positions:
        return {}
    text = response.texts(STOP_REASON)[sequence]
    strings = [request.stop] if isinstance(request.stop, str) else request.stop or []
    return {STOP_REASON: int(text) if text.isdecimal() and text not in strings else text or None}
