"""Host memory that requests keep from their submission to their answer, and its bound for all of them together.

Any thread. A request is measured once, when it is submitted, by the lengths of what its client sent and by the
log-probabilities that its answer will gather. It counts until it is answered, whether it waits, runs or was preempted.
Not counted is what has a bound of its own: prompt tables and adapters that clients send, n-grams, logits, and what else
running adds to a sequence (output tokens, copies in the worker), which max_num_seqs and max_model_len bound.

The sizes below were measured with tracemalloc and Python 3.11; tests/unit/test_request_memory.py compares them.
"""

from __future__ import annotations

import json
import sys

from slipstream.core.byte_budget import ByteBudget
from slipstream.core.errors import CapacityError, RequestError
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams

MAX_UNCOUNTED_BYTES = 65536  # of a request, some 1,300 tokens: short requests come in however full of long ones it is

_PLACE_BYTES = 8  # in a list or tuple
_ID_BYTES = 32 + _PLACE_BYTES  # an integer is an object of its own, but for those up to 256, which few tokens are
_STATE_BYTES = 20  # of an automaton, for each id or character of its words
_WORD_BYTES = 100  # a tuple or text, its place and its end in the automaton
_PAIR_BYTES = 120  # a tuple of an id and a float
_SET_BYTES = 40  # an entry of the set in each sequence's StopConditions
_ARRAY_BYTES = 4
_JSON_BYTES = 20  # of Python's objects for a byte of JSON such as [0]; of others less
_POSITION_BYTES, _LOGPROB_BYTES = 170, 122  # the log-probabilities of a position, and each of them


def bytes_by_field(request: Request) -> dict[str, int]:
    """What a prepared request keeps, by the names that errors have for the fields that a client may make large."""
    params, num_tokens = request.params, request.num_prompt_tokens
    num_sequences = params.n if params.beam_width <= 1 else 2 * params.beam_width + 1  # a step has two lists of its own
    found = {"prompt": num_tokens * (_ID_BYTES + num_sequences * _PLACE_BYTES) + request.num_echo_bytes}
    if request.prompt_rows is not None:
        found["prompt_embedding_table"] = 2 * _ID_BYTES * len(request.prompt_rows.positions)
    found["logprobs"], found["prompt_logprobs"] = request.num_logprob_bytes, request.num_prompt_logprob_bytes
    found["reference_ids"] = _ARRAY_BYTES * len(params.reference_ids)
    found["embedding_bias"] = _ARRAY_BYTES * len(params.embedding_bias)
    found["logit_bias"] = _PAIR_BYTES * len(params.logit_bias)
    found["allowed_token_ids"] = (_ID_BYTES + _ARRAY_BYTES) * len(params.allowed_token_ids or ())
    found["stop_token_ids"] = (_ID_BYTES + num_sequences * _SET_BYTES) * len(params.stop_token_ids)
    found |= _bytes_of_words(params)
    if params.guide is not None:
        found["guided_decoding_guide"] = sys.getsizeof(params.guide.text)
    if params.logits_processors:
        found["logits_processors"] = _JSON_BYTES * sum(
            len(json.dumps(dict(call.kwargs))) for call in params.logits_processors
        )
    return found


def logprob_bytes(num_positions: int, num_alternatives: int) -> int:
    """Host bytes of log-probabilities that wait to be sent: per position the token's own and num_alternatives more."""
    return num_positions * (_POSITION_BYTES + _LOGPROB_BYTES * (1 + num_alternatives))


def _bytes_of_words(params: SamplingParams) -> dict[str, int]:
    """One look at each word; its automaton was built with one at each symbol."""
    found = {}
    for name in ("stop_words_ids", "bad_words_ids"):
        if words := getattr(params, name):
            found[name] = (_ID_BYTES + _STATE_BYTES) * sum(map(len, words)) + _WORD_BYTES * len(words)
    if params.stop:
        num_chars = sum(map(len, params.stop))
        found["stop"] = sum(map(sys.getsizeof, params.stop)) + _STATE_BYTES * num_chars + _WORD_BYTES * len(params.stop)
    return found


class RequestMemory(ByteBudget):
    """The host memory of the requests that are not answered."""

    def take(self, request: Request) -> None:
        """Raises RequestError for more than there is, CapacityError for more than is left."""
        num_bytes, limit = request.num_bytes, f"max_total_request_bytes={self._limit}"
        if num_bytes <= MAX_UNCOUNTED_BYTES:
            return
        if num_bytes > self._limit:
            field, largest = _largest(request)
            told = f"has {largest} bytes in memory, the request {num_bytes}; accepted: at most {limit} for all of it"
            raise RequestError(field, told)
        if (others := self._hold(request.handle, num_bytes)) is not None:
            field, largest = _largest(request)
            told = f"{others.num_bytes} bytes of {others.num_requests} requests are in memory"
            raise CapacityError(f"{told}, this has {num_bytes} more, {largest} of them for its {field}; {limit}")


def _largest(request: Request) -> tuple[str, int]:
    sizes = bytes_by_field(request)
    field = max(sizes, key=sizes.__getitem__)
    return field, sizes[field]
