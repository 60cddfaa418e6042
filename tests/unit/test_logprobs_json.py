"""The JSON of log-probabilities is what Python's own writer makes of them."""

from __future__ import annotations

import json
import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.core.outputs import RequestOutput, TokenLogprobs
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.protocol.request_parser import ClientRequest
from slipstream.protocol.responses import ENCODERS, encode_response, response_frames, write_entry

TEXTS = ["a", '"', "\\", "\n", "\x00", "é", "\ufffd", "😀", "", "}}, {"]
logprobs = st.floats(-1e35, 0) | st.sampled_from([-0.0, -math.inf, -1e-300, -12345.678])
pairs = st.lists(st.tuples(st.integers(0, 12), logprobs), max_size=6)


def as_dictionaries(entry: TokenLogprobs) -> str:
    """vLLM's form. If a token is there twice, the first counts."""
    ranked: list[tuple[int, float, int | None]] = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)]
    ranked += [(token_id, logprob, None) for token_id, logprob in entry.asked]
    found: dict[str, dict[str, object]] = {}
    for token_id, logprob, rank in ranked:
        text = TEXTS[token_id % len(TEXTS)]
        found.setdefault(str(token_id), {"logprob": max(logprob, -9999.0), "rank": rank, "decoded_token": text})
    return json.dumps(found)


@given(token_id=st.integers(0, 12), logprob=logprobs, rank=st.integers(1, 10**6), top=pairs, asked=pairs)
def test_it_is_what_the_library_writes(
    token_id: int, logprob: float, rank: int, top: list[tuple[int, float]], asked: list[tuple[int, float]]
) -> None:
    entry = TokenLogprobs(token_id, logprob, rank, top, asked)
    expected = as_dictionaries(entry)
    write_entry(entry, lambda token_id: TEXTS[token_id % len(TEXTS)])
    assert entry.json == expected.encode() and not entry.top and not entry.asked


def test_what_is_no_number_is_said_as_before() -> None:
    entry = TokenLogprobs(1, math.nan, 1)
    write_entry(entry, str)
    assert entry.json == b'{"1": {"logprob": NaN, "rank": 1, "decoded_token": "1"}}'


def encoded(entries: list[TokenLogprobs | None] | None) -> tuple[int, str]:
    """The length that is written before the text, and the text."""
    output = RequestOutput(Request([5], SamplingParams(), handle=1), "", [5], prompt_logprobs=entries)
    shape, data = ENCODERS["prompt_logprobs"](ClientRequest(1, output.request), output)
    assert shape == (1,)
    return int.from_bytes(data[:4], "little"), data[4:].decode()


@pytest.mark.parametrize("count", [0, 1, 2, 5])
@pytest.mark.parametrize("is_first_none", [False, True])
def test_the_list_of_entries(count: int, is_first_none: bool) -> None:
    entries: list[TokenLogprobs | None] = [TokenLogprobs(token_id, -0.5, 1) for token_id in range(count)]
    if is_first_none:
        entries.insert(0, None)
    expected = [None if entry is None else json.loads(as_dictionaries(entry)) for entry in entries]
    for entry in entries[:3]:
        if entry is not None:
            write_entry(entry, str)
    num_bytes, text = encoded(entries)
    assert num_bytes == len(text) and len(json.loads(text)) == len(expected)
    assert [found and set(found) for found in json.loads(text)] == [told and set(told) for told in expected]


def test_no_entries() -> None:
    assert encoded(None) == (4, "null") and encoded([]) == (2, "[]")


def test_a_long_answer_is_copied_as_seldom_as_can_be() -> None:
    """Answers of others wait for each copy: 84 MB took 0.55 s in eight."""
    entries = [TokenLogprobs(5, -0.5, 1) for _ in range(1000)]
    for entry in entries:
        entry.json = b"{" + b" " * 10_000 + b"}"
    output = RequestOutput(Request([5], SamplingParams(), handle=1), "", [5], prompt_logprobs=[*entries])
    client = ClientRequest(1, output.request, outputs=("prompt_logprobs",), is_text_only=False)
    size = 10_000_000
    tracemalloc.start()
    try:
        response = encode_response(client, output)
        of_response = tracemalloc.get_traced_memory()[1]
        del output
        tracemalloc.reset_peak()
        frames = response_frames([response])
        of_frame = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(frames) == 1 and len(frames[0]) > size
    assert of_response < 2.2 * size, "the list, and the response around it"
    assert of_frame < 2.2 * size, "the response, and the frame around it"
