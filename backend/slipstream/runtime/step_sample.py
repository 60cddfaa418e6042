"""What a step has sampled: on its way while the device works, plain data once it is read. Engine thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from slipstream.core.errors import SlipstreamError
from slipstream.core.outputs import TokenLogprobs
from slipstream.core.request import Request
from slipstream.core.step import ScheduledRequest, ScheduledStep
from slipstream.runtime.sampler import PendingTokens
from slipstream.runtime.verify import Verdict, Verification

PromptEntries = dict[int, list[TokenLogprobs | None]]


@dataclass(slots=True)
class StepSample:
    """token_ids: aligned with step.requests, empty where nothing was sampled.

    logprobs, prompt_logprobs: by request_id, one entry per token, of those that asked; the prompt's come once, with
    the first token.
    failures: requests that went wrong by themselves, with the reason; the others of the step are sound.
    kept_rows: by place in step.requests, where drafts were verified: rows of the request that hold for good.
    """

    token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: PromptEntries = field(default_factory=dict)
    failures: list[tuple[Request, SlipstreamError]] = field(default_factory=list)
    kept_rows: dict[int, list[int]] = field(default_factory=dict)

    def result(self) -> StepSample:
        return self


class PendingSample(Protocol):
    """A step that has been launched."""

    def result(self) -> StepSample:
        """Wait for the step, not for those launched since. Call it once."""
        ...


@dataclass(frozen=True)
class LaunchedSample:
    """row_of: for each request of the step, its place among the drawn tokens, or -1."""

    row_of: list[int]
    tokens: PendingTokens
    prompt_logprobs: PromptEntries

    def result(self) -> StepSample:
        sampled = self.tokens.result()
        token_ids = [[sampled.token_ids[row]] if row >= 0 else [] for row in self.row_of]
        return StepSample(token_ids, sampled.logprobs, self.prompt_logprobs, sampled.failures)


@dataclass(frozen=True)
class LaunchedVerification:
    """keep: brings the cache of (request's rows, those of them that hold) into line; called once the verdict is in."""

    step: ScheduledStep
    verification: Verification
    tokens: PendingTokens
    prompt_logprobs: PromptEntries
    keep: Callable[[Sequence[tuple[ScheduledRequest, list[int]]]], None]

    def result(self) -> StepSample:
        sampled = self.tokens.result()
        verdicts = iter(self.verification.verdicts(sampled))
        found: dict[int, Verdict] = {
            place: next(verdicts) for place, row in enumerate(self.step.requests) if row.samples
        }
        judged = {place: verdict for place, verdict in found.items() if self.step.requests[place].num_drafts}
        self.keep([(self.step.requests[place], verdict.rows) for place, verdict in judged.items()])
        logprobs = {
            request.request_id: [entries[row] for row in verdict.rows]
            for place, verdict in found.items()
            if (entries := sampled.logprobs.get((request := self.step.requests[place].request).request_id))
        }
        return StepSample(
            [found[place].token_ids if place in found else [] for place in range(len(self.step.requests))],
            logprobs,
            self.prompt_logprobs,
            sampled.failures,
            {place: verdict.rows for place, verdict in judged.items()},
        )


def computed_rows(step: ScheduledStep, sample: StepSample) -> list[list[int]]:
    """Per request of a step, its rows among the step's tokens that hold for good."""
    starts = accumulate((row.num_scheduled_tokens for row in step.requests), initial=0)
    return [
        [start + kept for kept in sample.kept_rows[place]]
        if place in sample.kept_rows
        else list(range(start, start + row.num_scheduled_tokens))
        for place, (start, row) in enumerate(zip(starts, step.requests))
    ]
