"""One engine step as the scheduler orders it: lists with one entry per request. Engine thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from slipstream.core.adapters import Adapter
from slipstream.core.host_cache import BlockCopies
from slipstream.core.layered_prefill import LayeredChunk
from slipstream.core.request import Request

if TYPE_CHECKING:
    from slipstream.core.decode_run import RunRows
    from slipstream.core.verify_run import VerifyRows


class ScheduledRequest(NamedTuple):
    """One entry of a step: num_scheduled_tokens of token_ids + draft_token_ids, from num_computed_tokens on.

    A row past both is the token that the step before this one samples, which only the device knows.
    samples: the rows reach the request's last token, so the step must sample for it. The last num_drafts rows are
    drafts, which it must verify.
    """

    request: Request
    num_computed_tokens: int
    num_scheduled_tokens: int
    samples: bool
    num_drafts: int = 0


@dataclass(slots=True)
class ScheduledStep:
    """Aligned lists, as ScheduledRequest names them: decodes first, then prefills. Empty when nothing can run.

    preempted: lost their blocks just now. copies: between device and host memory, made before the step computes.
    adapters: that have to be in slots before. num_decodes, prefill_weight, scheduled_at, device_s: of
    core/prefill_budget.py; the last is known when the step has been read.
    run: if its decodes go on alike. verified: if these verify drafts.
    layered: some layers of a prompt's chunk, whose request is not among `requests` then.
    """

    requests: list[Request] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    num_drafts: list[int] = field(default_factory=list)
    total_num_scheduled_tokens: int = 0
    preempted: list[Request] = field(default_factory=list)
    copies: BlockCopies = field(default_factory=BlockCopies)
    adapters: list[tuple[int, Adapter]] = field(default_factory=list)
    num_decodes: int = 0
    prefill_weight: float = 0.0
    scheduled_at: float = 0.0
    device_s: float | None = None
    run: RunRows | None = None
    verified: VerifyRows | None = None
    layered: LayeredChunk | None = None

    @classmethod
    def of(cls, rows: Sequence[ScheduledRequest]) -> ScheduledStep:
        step = cls(total_num_scheduled_tokens=sum(row.num_scheduled_tokens for row in rows))
        for row in rows:
            step.add(row.request, row.num_computed_tokens, row.num_scheduled_tokens, row.samples, row.num_drafts)
        return step

    def add(
        self, request: Request, num_computed_tokens: int, num_scheduled_tokens: int, samples: bool, num_drafts: int = 0
    ) -> None:
        self.requests.append(request)
        self.num_computed_tokens.append(num_computed_tokens)
        self.num_scheduled_tokens.append(num_scheduled_tokens)
        self.samples.append(samples)
        self.num_drafts.append(num_drafts)

    def fill_decodes(self, counts: list[int] | None = None) -> None:
        """Give the requests so far a token each and its drafts, which are sampled. counts: both together; None: none of
        them has drafts."""
        count = len(self.requests)
        self.samples, self.num_drafts = [True] * count, [0] * count
        self.num_scheduled_tokens = [1] * count if counts is None else counts
        if counts is not None and sum(counts) > count:
            self.num_drafts = [number - 1 for number in counts]

    def add_prefill(self, request: Request, num_new: int, num_missing: int) -> None:
        """A chunk of a prompt, which samples if nothing is missing then; counts as computed."""
        samples = num_new == num_missing
        self.add(request, request.num_computed_tokens, num_new, samples)
        request.num_computed_tokens += num_new
        request.num_output_placeholders += samples

    def written_blocks(self, block_size: int) -> Iterator[int]:
        """Blocks of the first KV group that nothing of this sequence has written before, and which the step may write;
        behind a row that samples, also those for drafts."""
        lists = self.requests, self.num_computed_tokens, self.num_scheduled_tokens, self.samples
        for request, first, count, samples in zip(*lists):
            if count == 1 and first % block_size and request.speculation is None:
                continue  # the token before it is in the same block
            end = len(request.block_ids) if samples else -(-(first + count) // block_size)
            yield from request.block_ids[first // block_size : end]
        if (chunk := self.layered) is not None:
            end = -(-(chunk.first_token + chunk.num_tokens) // block_size)
            yield from chunk.request.block_ids[chunk.first_token // block_size : end]

    def withdraw(self, index: int) -> None:
        """Remove a request from those that sample."""
        self.samples[index] = False

    @property
    def rows(self) -> list[ScheduledRequest]:
        """The lists, row by row."""
        lists = self.requests, self.num_computed_tokens, self.num_scheduled_tokens, self.samples, self.num_drafts
        return list(map(ScheduledRequest._make, zip(*lists)))
