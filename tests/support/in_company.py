"""Requests alone and beside each other, for tests that nothing beside a request changes what it is told."""

from __future__ import annotations

from collections.abc import Sequence

from engine_driver import Told, run_all, run_steps
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.engine import Engine


def told_of(told: Sequence[Told]) -> list[tuple]:
    """What must be equal: tokens, and all that is said of them, to the bit."""
    return [(each.token_ids, [(entry.logprob, entry.top) for entry in each.logprobs]) for each in told]


def each_alone(engine: Engine, prompts: Sequence[list[int]], wanted: Sequence[SamplingParams]) -> list[tuple]:
    """wanted: of each prompt; perhaps more."""
    pairs = zip(prompts, wanted[: len(prompts)], strict=True)
    return [told_of(run_all(engine, [prompt], params))[0] for prompt, params in pairs]


def together(
    engine: Engine, prompts: Sequence[list[int]], wanted: Sequence[SamplingParams], num_steps: int
) -> tuple[list[tuple], list[Request]]:
    """In two waves, the second after num_steps, so that prompts are computed beside decodes and find beginnings of
    others in the cache."""
    pairs = enumerate(zip(prompts, wanted, strict=True))
    requests = [Request(list(prompt), params, handle=i) for i, (prompt, params) in pairs]
    told: dict[Request, Told] = {}
    for request in requests[::2]:
        engine.submit(request)
    run_steps(engine, told, num_steps)
    for request in requests[1::2]:
        engine.submit(request)
    run_steps(engine, told)
    assert engine.error is None
    return told_of([told[request] for request in requests]), requests
