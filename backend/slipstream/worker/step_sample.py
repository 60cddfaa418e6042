"""What a step has sampled: on its way while the device works, plain data once it is read. Engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.core.errors import SlipstreamError
from slipstream.core.outputs import TokenLogprobs
from slipstream.core.request import Request
from slipstream.core.step import ScheduledStep
from slipstream.worker.computed_rows import ComputedRows
from slipstream.worker.host_copy import HostCopy
from slipstream.worker.sample.sampler import PendingTokens
from slipstream.worker.spec_decode.verify import Verdict, Verification

PromptEntries = dict[int, list[TokenLogprobs | None]]


@dataclass(slots=True)
class StepSample:
    """token_ids: aligned with step.requests, empty where nothing was sampled.

    logprobs, prompt_logprobs: by request_id, one entry per token, of those that asked; the prompt's come once, with
    the first token.
    failures: requests that went wrong by themselves, with the reason; the others of the step are sound.
    late: requests that this step could not serve, and a later one will: their rows are to be withdrawn.
    kept_rows: by place in step.requests, where drafts were verified: the last token's row and those of drafts taken.
    """

    token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: PromptEntries = field(default_factory=dict)
    failures: list[tuple[Request, SlipstreamError]] = field(default_factory=list)
    kept_rows: dict[int, list[int]] = field(default_factory=dict)
    late: list[Request] = field(default_factory=list)

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
        return StepSample(token_ids, sampled.logprobs, self.prompt_logprobs, sampled.failures, late=sampled.late)


@dataclass(frozen=True)
class LaunchedVerification:
    """paths: a word of AcceptedRows per request of the batch, on its way. rows: the same step, on the device.

    places: of the step's requests in the batch, if some that are in there have ended; None: one after another.
    """

    step: ScheduledStep
    verification: Verification
    tokens: PendingTokens
    paths: HostCopy
    prompt_logprobs: PromptEntries
    rows: ComputedRows
    places: Sequence[int] | None = None

    def result(self) -> StepSample:
        (paths,) = self.paths.lists()
        sampled = self.tokens.result()  # were drawn before
        found: dict[int, Verdict] = {}
        num_sampling = 0
        for place, row in enumerate(self.step.requests):
            if row.samples:
                index = num_sampling if self.places is None else self.places[place]
                path = paths[place if self.places is None else self.places[place]]
                num_sampling += 1
                if not row.request.is_finished:  # it was while the step was under way, and its drafts are gone
                    found[place] = self.verification.verdict(index, path, sampled.token_ids)
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
            {place: verdict.rows for place, verdict in found.items() if self.step.requests[place].num_drafts},
            sampled.late,
        )
