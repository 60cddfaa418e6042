"""What a step has sampled: on its way while the device works, plain data once it is read. Engine thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from slipstream.core.errors import SlipstreamError
from slipstream.core.outputs import TokenLogprobs
from slipstream.core.request import Request
from slipstream.core.step import ScheduledStep
from slipstream.runtime.computed_rows import ComputedRows
from slipstream.runtime.host_copy import HostCopy
from slipstream.runtime.sampler import PendingTokens
from slipstream.runtime.verify import Verification

PromptEntries = dict[int, list[TokenLogprobs | None]]


@dataclass(slots=True)
class StepSample:
    """token_ids: aligned with step.requests, empty where nothing was sampled.

    logprobs, prompt_logprobs: by request_id, one entry per token, of those that asked; the prompt's come once, with
    the first token.
    failures: requests that went wrong by themselves, with the reason; the others of the step are sound.
    """

    token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: PromptEntries = field(default_factory=dict)
    failures: list[tuple[Request, SlipstreamError]] = field(default_factory=list)

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
    """paths: a word of KeptRows per request of the step, on its way. rows: the same step, on the device."""

    step: ScheduledStep
    verification: Verification
    tokens: PendingTokens
    paths: HostCopy
    prompt_logprobs: PromptEntries
    rows: ComputedRows

    def result(self) -> StepSample:
        (paths,) = self.paths.lists()
        sampled = self.tokens.result()  # were drawn before
        sampling = [place for place, row in enumerate(self.step.requests) if row.samples]
        found = {
            place: self.verification.verdict(index, paths[place], sampled.token_ids)
            for index, place in enumerate(sampling)
        }
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
        )
