"""Verification: which drafts of a step's requests are taken, and the token that follows them. Engine thread.

Every draft is a row of the step, so the sampler has drawn what the model itself would say after each of them; what is
left is to go from the last token along drafts that agree, which happens on the device, so that heads may draft from
what holds before the host has read anything. `exact` does no more: a token is drawn with the noise of its position,
whatever was drafted, so text and seeds are those of plain decoding. `rejection` compares the model's probabilities with
those a draft was drawn from (arXiv:2302.01318), for drafts that were drawn. Lossy, by request: `typical` (Medusa,
arXiv:2401.10774) and `top_p_window` (PaddleNLP). Greedy requests are always exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from slipstream_kernels import ops

from slipstream.core.config import SpeculationConfig
from slipstream.core.drafts import parents_of, row_masks, row_paths
from slipstream.core.request import Request
from slipstream.core.step import ScheduledRequest
from slipstream.nn.batch import ForwardBatch
from slipstream.worker.host_copy import to_device
from slipstream.worker.sample.penalties import Paths
from slipstream.worker.sample.sampler import Draws

_ACCEPT_SALT = 0x5851F42D4C957F2D  # noise of its own, apart from that of drafting and of plain draws
_RECOVER_SALT = 0x14057B7EF767814F


@dataclass(frozen=True)
class Verdict:
    """token_ids: accepted drafts and the token after them. rows: those of the last token and of the accepted drafts,
    counted from the request's first row that was sampled; rows[i] predicted token_ids[i]."""

    token_ids: list[int]
    rows: list[int]


class Verification:
    """The sampled rows of one step in which requests have drafts. scheduled: the requests that sample, in order."""

    def __init__(self, scheduled: Sequence[ScheduledRequest], config: SpeculationConfig) -> None:
        self._config = config
        self._scheduled = scheduled
        self.first_rows: list[int] = []
        self.num_rows = 0
        self._judged: list[int] = []  # places in `scheduled` of requests with drafts judged by probabilities
        self._rejection: list[int] = []
        for place, row in enumerate(scheduled):
            self.first_rows.append(self.num_rows)
            self.num_rows += 1 + row.num_drafts
            mode = _mode(row)
            if mode == "rejection":
                self._rejection.append(place)
            elif mode != "exact":
                self._judged.append(place)
        self._marks: torch.Tensor | None = None  # by sampled row, as in ops.accept_drafts
        self._scores: torch.Tensor | None = None

    @property
    def requests(self) -> list[Request]:
        """Of each row."""
        return [row.request for row in self._scheduled for _ in range(1 + row.num_drafts)]

    @property
    def paths(self) -> Paths:
        """The drafts that lead to each row."""
        return [
            path
            for row in self._scheduled
            for path in row_paths(row.request.draft_parents, row.request.draft_token_ids[: row.num_drafts])
        ]

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

    def accept(
        self,
        batch: ForwardBatch,
        num_drafts: torch.Tensor,
        next_ids: torch.Tensor,
        dead_rows: set[int],
        out: ops.AcceptedRows | None = None,
    ) -> ops.AcceptedRows:
        """Decide, once the rows are drawn. next_ids: [T], what follows each row of the batch. dead_rows: sampled rows
        of drafts that must not be taken. num_drafts: [R] int32, of all requests of the batch."""
        if dead_rows:
            dead = to_device(sorted(dead_rows), torch.int64, next_ids.device)
            if self._marks is None:
                self._marks = torch.zeros(self.num_rows, dtype=torch.int8, device=next_ids.device)
            self._marks.index_fill_(0, dead, -1)
        return ops.accept_drafts(
            batch.token_ids,
            next_ids,
            batch.query_start_loc,
            num_drafts,
            batch.slot_mapping,
            tree_mask=batch.tree_mask,
            marks=_at_rows(batch, self._marks),
            scores=_at_rows(batch, self._scores),
            out=out,
        )

    def verdict(self, place: int, path: int, drawn: Sequence[int]) -> Verdict:
        """Of scheduled[place], once on the host. path: its AcceptedRows word; drawn: of all sampled rows."""
        row, first = self._scheduled[place], self.first_rows[place]
        rows = [number for number in range(1 + row.num_drafts) if path >> number & 1]
        drafts = row.request.draft_token_ids
        return Verdict([*(drafts[number - 1] for number in rows[1:]), drawn[first + rows[-1]]], rows)

    # ---- parts

    def _measure(self, logits: torch.Tensor, draws: Draws) -> None:
        """Marks of drafts that the lossy modes let pass, and how likely the way to each is."""
        device = logits.device
        marks = torch.zeros(self.num_rows, dtype=torch.int8, device=device)
        scores = torch.zeros(self.num_rows, dtype=torch.float32, device=device)
        for place in self._judged:
            row, first = self._scheduled[place], self.first_rows[place]
            parents, num_drafts = row.request.draft_parents[: row.num_drafts], row.num_drafts
            after = [first + 1 + parent for parent in parents_of(parents, num_drafts)]
            row_of = to_device(after, torch.int64, device)
            probs = torch.softmax(logits[row_of] / draws.temperature[row_of][:, None], dim=-1)
            drafts = to_device(row.request.draft_token_ids[:num_drafts], torch.int64, device)
            sees = _ancestors(parents, num_drafts, device)
            own = slice(first + 1, first + 1 + num_drafts)
            chosen = probs.gather(1, drafts[:, None])
            marks[own] = self._passes(row.request, probs, chosen, sees)
            scores[own] = sees.float() @ chosen[:, 0].clamp(min=1e-30).log()
        self._marks, self._scores = marks, scores

    def _passes(self, request: Request, probs: torch.Tensor, chosen: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
        """[num_drafts]: whether the request's mode lets a draft pass, of probability `chosen` [num_drafts, 1]."""
        config = self._config
        assert request.speculation is not None
        if request.speculation.acceptance == "typical":
            entropy = -(probs * probs.clamp(min=1e-30).log()).sum(dim=-1)
            floor = (config.typical_alpha * torch.exp(-entropy)).clamp(max=config.typical_threshold)
            return chosen[:, 0] > floor
        top_p = request.params.top_p if request.params.top_p < 1.0 else config.acceptance_top_p
        above = probs > chosen
        rank = above.sum(dim=-1)
        is_likely = ((probs * above).sum(dim=-1) < top_p) & (chosen[:, 0] > 0)
        return is_likely | ((rank == 1) & (_longest_runs(sees, rank == 0) >= config.acceptance_window))

    def _reject(
        self, logits: torch.Tensor, draws: Draws, positions: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """Rejection sampling of chains that were drawn: a draft d of q is taken with probability min(1, p(d) / q(d)),
        else a token is drawn of max(p - q, 0). Rows without a draft after them keep the token drawn."""
        device = logits.device
        rows: list[int] = []
        tokens: list[int] = []
        for place in self._rejection:
            row, first = self._scheduled[place], self.first_rows[place]
            rows += range(first, first + row.num_drafts)
            tokens += row.request.draft_token_ids[: row.num_drafts]
        drawn_from = [
            self._scheduled[place].request.draft_probs[: self._scheduled[place].num_drafts] for place in self._rejection
        ]
        row_of, drafts = to_device(rows, torch.int64, device), to_device(tokens, torch.int64, device)
        part = Draws(*(None if column is None else column[row_of] for column in draws))  # type: ignore[arg-type]
        replaced = ops.reject_drafts(
            logits[row_of],
            torch.cat(drawn_from),
            drafts,
            *part[:4],
            accept_seeds=part.seeds ^ _ACCEPT_SALT,
            recover_seeds=part.seeds ^ _RECOVER_SALT,
            positions=positions[row_of] + 1,
        )
        return token_ids.index_copy(0, row_of, replaced)


def _mode(row: ScheduledRequest) -> str:
    """How a request's drafts are judged in this step."""
    request = row.request
    if not row.num_drafts or request.speculation is None or request.params.is_greedy:
        return "exact"
    mode = request.speculation.acceptance
    if mode == "rejection" and (request.draft_probs is None or request.draft_parents):
        return "exact"  # what was not drawn needs no rejection: agreeing with the model's own draw is the same thing
    return mode


def _at_rows(batch: ForwardBatch, values: torch.Tensor | None) -> torch.Tensor | None:
    """Values of sampled rows, by row of the batch; 0 where nothing was sampled."""
    if values is None:
        return None
    return values.new_zeros(batch.token_ids.shape).index_copy_(0, batch.logits_indices, values)


def _ancestors(parents: Sequence[int], num_drafts: int, device: torch.device) -> torch.Tensor:
    """[num_drafts, num_drafts] bool: whether a draft's way leads through another; its own is on it."""
    words = to_device(list(row_masks(parents, num_drafts)[1:]), torch.int64, device)
    bits = torch.arange(1, num_drafts + 1, device=device)
    return (words[:, None] >> bits & 1).bool()


def _longest_runs(sees: torch.Tensor, is_wanted: torch.Tensor) -> torch.Tensor:
    """Per draft, the most wanted drafts in a row below it. sees: as of _ancestors."""
    # below[i, j, k]: k lies on the way from i, itself left out, to j
    below = sees[None, :, :] & ~sees[:, None, :] & sees.T[:, :, None]
    is_run = ~(below & ~is_wanted).any(dim=2)
    return torch.where(is_run, below.sum(dim=2), 0).amax(dim=1)
