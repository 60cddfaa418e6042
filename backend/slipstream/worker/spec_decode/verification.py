"""Verification: which drafts of a step are accepted, and the token after them. Engine thread.

Every draft is a row of the step, so the sampler draws the model's own token after each of them. Accepted are the drafts
that equal these tokens, from the last token on. Modes: `exact` needs nothing else: a token is drawn with the noise of
its position, so text and seeds are those of plain decoding. `rejection` compares the model's probabilities with those
that a draft was drawn from (arXiv:2302.01318). Lossy, by request: `typical` (Medusa, arXiv:2401.10774) and
`top_p_window` (PaddleNLP). Greedy requests are always exact. Knows rows and probabilities, neither model nor caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from slipstream_kernels import ops

from slipstream.core.config import SpeculationConfig
from slipstream.core.drafts import parents_of, row_masks, row_paths
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.parallel import Parallel
from slipstream.worker.host_copy import to_device
from slipstream.worker.launched_step import RunningStep
from slipstream.worker.request_state import RequestState
from slipstream.worker.sample.draws import Draws
from slipstream.worker.sample.penalties import Paths

_ACCEPT_SALT = 0x5851F42D4C957F2D  # noise of its own, apart from that of drafting and of plain draws
_RECOVER_SALT = 0x14057B7EF767814F


@dataclass(slots=True)
class DraftedRequest:
    """A request that samples. draft_token_ids, draft_parents: of its drafts, empty if only the device knows them.

    draft_probs: [num_drafts, vocab], what each draft was drawn from; None: they were not drawn.
    """

    state: RequestState
    num_drafts: int
    draft_token_ids: Sequence[int] = ()
    draft_parents: Sequence[int] = ()
    draft_probs: torch.Tensor | None = None


def drafted_requests(running: RunningStep, draft_probs: Mapping[int, torch.Tensor]) -> list[DraftedRequest]:
    """The requests of a step that sample. draft_probs: by request id, of the drafts that it was last given."""
    step, found, end = running.step, [], 0
    for index, state in enumerate(running.states):
        end += step.num_scheduled_tokens[index]
        if not step.samples[index]:
            continue
        num_drafts = step.num_drafts[index]
        drafts = step.token_ids[end - num_drafts : end] if num_drafts else ()
        probs = draft_probs.get(state.sequence_id) if num_drafts else None
        parents = step.draft_parents.get(state.sequence_id, ())
        found.append(DraftedRequest(state, num_drafts, drafts, parents, None if probs is None else probs[:num_drafts]))
    return found


class Verification:
    """The sampled rows of one step in which requests have drafts. num_drafts: of each request that samples, in order.
    drafted: these requests; none if all are plain, of which nothing has to be known."""

    def __init__(self, num_drafts: Sequence[int], drafted: Sequence[DraftedRequest], config: SpeculationConfig) -> None:
        self._config = config
        self._drafted = drafted
        self.num_drafts = num_drafts
        self.num_rows = len(num_drafts) + sum(num_drafts)
        self.states: list[RequestState] = []  # the request of each row
        self._judged: list[int] = []  # indices in `drafted` of requests with drafts judged by probabilities
        self._rejection: list[int] = []
        for index, one in enumerate(drafted):
            state = one.state
            self.states += [state] * (1 + one.num_drafts)
            if state.is_greedy or state.acceptance == "exact":
                continue
            mode = _mode(one)
            if mode == "rejection":
                self._rejection.append(index)
            elif mode != "exact":
                self._judged.append(index)
        self._marks: torch.Tensor | None = None  # by sampled row, as in ops.accept_drafts
        self._scores: torch.Tensor | None = None

    @property
    def first_rows(self) -> list[int]:
        """The sampled row of each request's last token."""
        ends = accumulate(1 + count for count in self.num_drafts)
        return [end - 1 - count for end, count in zip(ends, self.num_drafts)]

    @property
    def paths(self) -> Paths:
        """The drafts that lead to each row."""
        return [path for one in self._drafted for path in row_paths(one.draft_parents, one.draft_token_ids)]

    @property
    def needs_judge(self) -> bool:
        return bool(self._judged or self._rejection)

    def judge(
        self, logits: torch.Tensor, draws: Draws, positions: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """See sampler.Judge."""
        if self._rejection:
            token_ids = self._reject(logits, draws, positions, token_ids)
        if self._judged:
            self._measure(logits, draws)
        return token_ids

    def bury(self, dead_rows: Sequence[int], device: torch.device) -> None:
        """dead_rows: sampled rows of drafts that must not be accepted."""
        if dead_rows:
            dead = to_device(list(dead_rows), torch.int64, device)
            self._marks = self._marks_of(device).index_fill_(0, dead, -1)

    def agree(self, parallel: Parallel, device: torch.device) -> None:
        """Take the first rank's judgement: only its logits have gone through logits processors."""
        if parallel.size == 1:
            return
        are_processed = any(one.num_drafts and one.state.params.logits_processors for one in self._drafted)
        if self._scores is not None:
            self._scores = parallel.agree(self._scores)
        if self._scores is not None or are_processed:
            self._marks = parallel.agree(self._marks_of(device))

    def accept(
        self,
        batch: ForwardBatch,
        num_drafts: torch.Tensor,
        next_ids: torch.Tensor,
        out: ops.AcceptedRows | None = None,
    ) -> ops.AcceptedRows:
        """Accept drafts, once the rows are drawn. next_ids: [T], the token after each row of the batch. num_drafts: [R]
        int32, of all requests of the batch."""
        rows = ops.VerifiedRows(
            batch.token_ids,
            next_ids,
            batch.query_start_loc,
            num_drafts,
            batch.slot_mapping,
            batch.tree_mask,
            marks=_at_rows(batch, self._marks),
            scores=_at_rows(batch, self._scores),
        )
        return ops.accept_drafts(rows, out)

    # ---- parts

    def _marks_of(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.num_rows, dtype=torch.int8, device=device) if self._marks is None else self._marks

    def _measure(self, logits: torch.Tensor, draws: Draws) -> None:
        """Mark the drafts that the lossy modes accept, and score each by the log-probability of its path."""
        device, temperature = logits.device, draws.metadata.temperature
        assert temperature is not None  # a step of greedy rows has no judge
        marks, first_rows = torch.zeros(self.num_rows, dtype=torch.int8, device=device), self.first_rows
        scores = torch.zeros(self.num_rows, dtype=torch.float32, device=device)
        for index in self._judged:
            one, first = self._drafted[index], first_rows[index]
            parents, num_drafts = one.draft_parents, one.num_drafts
            after = [first + 1 + parent for parent in parents_of(parents, num_drafts)]
            row_of = to_device(after, torch.int64, device)
            probs = torch.softmax(logits[row_of] / temperature[row_of][:, None], dim=-1)
            drafts = to_device(list(one.draft_token_ids), torch.int64, device)
            sees = _ancestors(parents, num_drafts, device)
            own = slice(first + 1, first + 1 + num_drafts)
            chosen = probs.gather(1, drafts[:, None])
            marks[own] = self._passes(one.state, probs, chosen, sees)
            scores[own] = sees.float() @ chosen[:, 0].clamp(min=1e-30).log()
        self._marks, self._scores = marks, scores

    def _passes(
        self, state: RequestState, probs: torch.Tensor, chosen: torch.Tensor, sees: torch.Tensor
    ) -> torch.Tensor:
        """[num_drafts]: whether the request's mode accepts a draft, whose probability is `chosen` [num_drafts, 1]."""
        config = self._config
        if state.acceptance == "typical":
            entropy = -(probs * probs.clamp(min=1e-30).log()).sum(dim=-1)
            floor = (config.typical_alpha * torch.exp(-entropy)).clamp(max=config.typical_threshold)
            return chosen[:, 0] > floor
        top_p = state.params.top_p if state.params.top_p < 1.0 else config.acceptance_top_p
        above = probs > chosen
        rank = above.sum(dim=-1)
        is_likely = (probs * above).sum(dim=-1) < top_p
        is_second = (rank == 1) & (_longest_runs(sees, rank == 0) >= config.acceptance_window)
        # of probability 0: banned, and second where a row has one other token left
        return (is_likely | is_second) & (chosen[:, 0] > 0)

    def _reject(
        self, logits: torch.Tensor, draws: Draws, positions: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """Rejection sampling of drawn chains: a draft d from q is accepted with probability min(1, p(d) / q(d)), else a
        token is drawn from max(p - q, 0). Rows without a draft after them keep their token."""
        device, first_rows = logits.device, self.first_rows
        rows: list[int] = []
        tokens: list[int] = []
        drawn_from: list[torch.Tensor] = []
        for index in self._rejection:
            one, first = self._drafted[index], first_rows[index]
            rows += range(first, first + one.num_drafts)
            tokens += one.draft_token_ids
            assert one.draft_probs is not None
            drawn_from.append(one.draft_probs)
        row_of, drafted = to_device(rows, torch.int64, device), to_device(tokens, torch.int64, device)
        seeds = draws.seeds[row_of]
        drafts = ops.DrawnDrafts(drafted, torch.cat(drawn_from), seeds ^ _ACCEPT_SALT, seeds ^ _RECOVER_SALT)
        metadata, positions = draws.metadata.of_rows(row_of), positions[row_of] + 1
        replaced = ops.reject_drafts(logits[row_of], metadata, drafts, positions)
        return token_ids.index_copy(0, row_of, replaced)


def _mode(one: DraftedRequest) -> str:
    """The acceptance mode of a request's drafts in this step."""
    if not one.num_drafts or one.state.is_greedy:
        return "exact"
    mode = one.state.acceptance
    if mode == "rejection" and (one.draft_probs is None or one.draft_parents):
        return "exact"  # for a draft that was not drawn, equality with the model's own draw has the same distribution
    return mode


def _at_rows(batch: ForwardBatch, values: torch.Tensor | None) -> torch.Tensor | None:
    """Values of sampled rows, by row of the batch; 0 where nothing was sampled."""
    if values is None:
        return None
    return values.new_zeros(batch.token_ids.shape).index_copy_(0, batch.logits_indices, values)


def _ancestors(parents: Sequence[int], num_drafts: int, device: torch.device) -> torch.Tensor:
    """[num_drafts, num_drafts] bool: whether a draft has another as ancestor; it counts as its own."""
    words = to_device(list(row_masks(parents, num_drafts)[1:]), torch.int64, device)
    bits = torch.arange(1, num_drafts + 1, device=device)
    return (words[:, None] >> bits & 1).bool()


def _longest_runs(sees: torch.Tensor, is_wanted: torch.Tensor) -> torch.Tensor:
    """Per draft, the longest run of wanted drafts directly below it. sees: the result of _ancestors."""
    # below[i, j, k]: k lies on the path from i (exclusive) to j
    below = sees[None, :, :] & ~sees[:, None, :] & sees.T[:, :, None]
    is_run = ~(below & ~is_wanted).any(dim=2)
    return torch.where(is_run, below.sum(dim=2), 0).amax(dim=1)
