"""What an engine still knows of requests that have ended: nothing that grows with their number."""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
from engine_driver import GREEDY, make_engine
from slipstream.core import request as request_module
from slipstream.core.request import Request
from slipstream.core.sampling_params import Guide, SamplingParams
from tiny_heads import speculation

FIRST = 10**9  # the sequence ids of this test: numbers that are nothing else
BOUNDED = (".expiries._heap", "._history._rows")  # two numbers per deadline, and a row per sequence that may run
KINDS = [
    GREEDY,
    replace(GREEDY, repetition_penalty=1.3),
    replace(GREEDY, bad_words_ids=((4, 5), (7,))),
    replace(GREEDY, logprobs=2, prompt_logprobs=1, return_context_logits=True),
    replace(GREEDY, guide=Guide("regex", "[a-z]{30}"), ignore_eos=False),
    replace(GREEDY, temperature=0.9, n=3, seed=3, logit_bias=((9, 3.0),)),
    replace(GREEDY, min_tokens=5, stop_token_ids=tuple(range(0, 400, 9))),
    SamplingParams(max_tokens=6, beam_width=3, temperature=0.0),
]


def known_ids(root: object) -> dict[str, set[int]]:
    """By where they are, the numbers from FIRST on in the objects of this project behind one."""
    seen: set[int] = set()
    left: list[tuple[object, str]] = [(root, "")]
    found: dict[str, set[int]] = {}
    while left:
        one, path = left.pop()
        if isinstance(one, int) and FIRST <= one < FIRST + 10**6:
            found.setdefault(path, set()).add(one)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            left += [(part, path) for pair in one.items() for part in pair]
        elif isinstance(one, list | tuple | set | frozenset | deque):
            left += [(part, path) for part in one]
        elif type(one).__module__.startswith("slipstream"):
            slots = itertools.chain.from_iterable(getattr(kind, "__slots__", ()) for kind in type(one).__mro__)
            names = [name for name in {*getattr(one, "__dict__", ()), *slots} if hasattr(one, name)]
            left += [(getattr(one, name), f"{path}.{name}") for name in names]
    return found


@pytest.mark.parametrize("method", ["", "mtp"])
def test_they_leave_nothing_behind(
    tiny_llama: Path, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of all kinds that are preempted, end, or are cancelled at any time."""
    dice = random.Random(1)
    monkeypatch.setattr(request_module, "_ids", itertools.count(FIRST))
    engine = make_engine(
        tiny_llama,
        {"max_model_len": 128},
        {"num_blocks": 24},
        {"overlap_scheduling": "on", "default_max_queue_ms": 100_000},
        speculation(method, tiny_llama, tmp_path) if method else None,
    )
    for handle in range(20):
        prompt = [dice.randrange(3, 420) for _ in range(dice.randrange(1, 50))]
        engine.submit(Request(prompt, KINDS[handle % len(KINDS)], handle=handle))
    while engine.has_work:
        engine.step()
        if dice.random() < 0.3:
            engine.cancel(dice.randrange(20))
    (last,) = engine.submit(Request([5, 6, 7], SamplingParams(max_tokens=2, logit_bias=((9, 3.0),)), handle=99))
    while engine.has_work:
        engine.step()
    assert engine.error is None
    found = {path: ids - {last.sequence_id} for path, ids in known_ids(engine).items() if not path.endswith(BOUNDED)}
    assert not {path: ids for path, ids in found.items() if ids}
