"""The JSON of log-probabilities is what Python's own writer makes of them."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st
from slipstream.core.outputs import TokenLogprobs
from slipstream.protocol.responses import write_entry

TEXTS = ["a", '"', "\\", "\n", "\x00", "é", "\ufffd", "😀", "", "}}, {"]
logprobs = st.floats(-1e35, 0) | st.sampled_from([-0.0, -math.inf, -1e-300, -12345.678])
pairs = st.lists(st.tuples(st.integers(0, 12), logprobs), max_size=6)


def as_dictionaries(entry: TokenLogprobs) -> str:
    """vLLM's form. Of a token that is there twice the first counts."""
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
    assert entry.json == expected and not entry.top and not entry.asked


def test_what_is_no_number_is_said_as_before() -> None:
    entry = TokenLogprobs(1, math.nan, 1)
    write_entry(entry, str)
    assert entry.json == '{"1": {"logprob": NaN, "rank": 1, "decoded_token": "1"}}'
