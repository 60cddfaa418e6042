"""Answers with many log-probabilities are written between those of others, whole and in order."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import backend_wire
from engine_peer import Backend, InThread
from slipstream.core.outputs import RequestOutput, TokenLogprobs
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.long_outputs import LongOutputs
from slipstream.protocol.wire import FrameType, ResponseFlag

TOP = [(number, -float(number)) for number in range(20)]
LONG = 300  # entries, each with so many alternatives: more than are written at once


def entries(count: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(number, -1.0, 1, TOP) for number in range(count)]


def client_of(handle: int, *outputs: str) -> Any:
    return SimpleNamespace(handle=handle, outputs=("text_output", *outputs), token_text=str)


def output_of(handle: int, count: int = 0, **fields: Any) -> RequestOutput:
    request = Request([5], SamplingParams(), handle=handle)
    return RequestOutput(request, "", [], prompt_logprobs=[None, *entries(count)] if count else None, **fields)


def written(long: LongOutputs, live: dict[int, Any]) -> list[RequestOutput]:
    found = []
    while long:
        found += long.write(live)
    return found


def test_what_comes_behind_a_long_output_of_the_same_request_waits_for_it() -> None:
    long, live = LongOutputs(), {1: client_of(1, "prompt_logprobs"), 2: client_of(2), 3: client_of(3, "logprobs")}
    first, second, last = output_of(1, LONG), output_of(1), output_of(1)
    assert not long.holds(live[1], output_of(1, 20)) and not long.holds(live[1], output_of(1))
    assert long.holds(live[1], first) and long.holds(live[1], second)
    assert not long.holds(live[2], output_of(2)) and not long.holds(live[2], output_of(2, LONG)), "not asked for"
    other = output_of(3, logprobs=entries(LONG))
    assert long.holds(live[3], other) and long.holds(live[1], last)
    assert written(long, live) == [first, second, last, other]
    assert all(entry is None or json.loads(entry.json) for entry in first.prompt_logprobs or ())
    assert not long.holds(live[1], output_of(1)) and not long


def test_what_has_ended_waits_for_nothing() -> None:
    long, live = LongOutputs(), {1: client_of(1, "prompt_logprobs"), 2: client_of(2, "prompt_logprobs")}
    for handle in live:
        assert long.holds(live[handle], output_of(handle, LONG))
    assert not long.holds(live[1], output_of(1, finish_reason=FinishReason.CANCELLED))
    del live[2]  # answered with an error meanwhile
    assert written(long, live) == []


def test_the_stream_of_another_goes_on(backend: Backend, demo_model: Path) -> None:
    """They were written at once, before any token of another request."""
    served = InThread(backend, demo_model)
    served.slow_down(0.002)
    step, told = served.server._engine.step, entries(20_000)

    def with_logprobs() -> Any:
        outputs = step()
        for output in outputs:
            if output.request.handle == 1 and output.request.num_output_tokens == 1:
                output.prompt_logprobs = [None, *told]
        return outputs

    served.server._engine.step = with_logprobs  # type: ignore[method-assign]
    backend.request(2, 1200)
    backend.request(1, 5, outputs=("text_output", "prompt_logprobs"))
    attack: list[backend_wire.Response] = []
    arrivals, is_over = [time.monotonic()], False
    while not (is_over and attack and attack[-1].flags & ResponseFlag.FINAL):
        found = backend_wire.decode_responses(backend.next(FrameType.RESPONSES))
        attack += [one for one in found if one.handle == 1]
        if not is_over and any(one.handle == 2 for one in found):
            arrivals.append(time.monotonic())
            is_over = any(one.handle == 2 and one.flags & ResponseFlag.FINAL for one in found)
    assert max(later - before for before, later in pairwise(arrivals)) < 0.4
    assert len(attack) == 5
    texts = [one.outputs[1][2][4:].decode() for one in attack]
    found = json.loads(texts[0])
    assert found[0] is None and len(found) == 20_001 and len(found[7]) == 20
    assert texts[1:] == ["null"] * 4
