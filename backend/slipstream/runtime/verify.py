"""Verification: which drafts of a step's requests are taken, and the token that follows them. Engine thread.

Every draft is a row of the step, so the sampler has drawn what the model itself would say after each of them; what is
left is to walk from the last token along drafts that agree. `exact` does no more: a token is drawn with the noise of
its position, whatever was drafted, so text and seeds are those of plain decoding. `rejection` compares the model's
probabilities with those a draft was drawn from (arXiv:2302.01318), for drafts that were drawn. Lossy, by request:
`typical` (Medusa, arXiv:2401.10774) and `top_p_window` (PaddleNLP). Greedy requests are always exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from slipstream_kernels import ops

from slipstream.core.config import SpeculationConfig
from slipstream.core.drafts import children_of_rows, parents_of, row_paths
from slipstream.core.request import Request
from slipstream.core.step import ScheduledRequest
from slipstream.runtime.host_copy import to_device
from slipstream.runtime.sampler import Draws, Sampled

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
        self.requests: list[Request] = []  # of each row
        self.paths: list[tuple[int, ...]] = []
        self.first_rows: list[int] = []
        for row in scheduled:
            request = row.request
            self.first_rows.append(len(self.requests))
            self.paths += row_paths(request.draft_parents, request.draft_token_ids[: row.num_drafts])
            self.requests += [request] * (1 + row.num_drafts)
        self._judged: list[int] = []  # places in `scheduled` of requests with drafts judged by probabilities
        self._rejection: list[int] = []
        for place, row in enumerate(scheduled):
            mode = _mode(row)
            if mode == "rejection":
                self._rejection.append(place)
            elif mode != "exact":
                self._judged.append(place)

    @property
    def needs_judge(self) -> bool:
        return bool(self._judged or self._rejection)

    def judge(
        self, logits: torch.Tensor, draws: Draws, positions: torch.Tensor, token_ids: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """See sampler.Judge. The columns: per draft of the lossy requests its probability, rank and acceptance."""
        if self._rejection:
            token_ids = self._reject(logits, draws, positions, token_ids)
        return token_ids, self._measure(logits, draws) if self._judged else ()

    def verdicts(self, sampled: Sampled) -> list[Verdict]:
        """Per request of `scheduled`, once the step is on the host."""
        columns = zip(*sampled.judged) if sampled.judged else iter(())
        verdicts = []
        for place, (row, first) in enumerate(zip(self._scheduled, self.first_rows)):
            request, num_drafts = row.request, row.num_drafts
            drawn = sampled.token_ids[first : first + 1 + num_drafts]
            if not num_drafts:
                verdicts.append(Verdict(drawn, [0]))
                continue
            parents, drafts = request.draft_parents[:num_drafts], request.draft_token_ids[:num_drafts]
            taken = [drawn[parent + 1] == token for parent, token in zip(parents_of(parents, num_drafts), drafts)]
            weights = [0.0] * num_drafts
            if place in self._judged:
                found = [next(columns) for _ in range(num_drafts)]
                weights = [probability for probability, _, _ in found]
                taken = self._lossy(request, parents, taken, found)
            for draft in range(num_drafts):
                taken[draft] = taken[draft] and first + 1 + draft not in sampled.dead_rows
            verdicts.append(_walk(parents, drafts, taken, weights, drawn))
        return verdicts

    # ---- parts

    def _lossy(
        self,
        request: Request,
        parents: Sequence[int],
        taken: list[bool],
        found: Sequence[tuple[float, int, bool]],
    ) -> list[bool]:
        """Drafts that agree, and those that the request's mode lets pass."""
        passes = [is_same or bool(is_good) for is_same, (_, _, is_good) in zip(taken, found)]
        assert request.speculation is not None
        if request.speculation.acceptance == "top_p_window":
            window = _best_runs(parents, [rank == 0 for _, rank, _ in found])
            for draft, (_, rank, _) in enumerate(found):
                if rank == 1 and window[draft] >= self._config.acceptance_window:
                    passes[draft] = True
        return passes

    def _measure(self, logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, ...]:
        """[number of drafts judged] each: probability, rank among all tokens, whether the mode accepts it."""
        config, device = self._config, logits.device
        rows: list[int] = []
        tokens: list[int] = []
        is_typical: list[int] = []
        top_p: list[float] = []
        for place in self._judged:
            row, first = self._scheduled[place], self.first_rows[place]
            request = row.request
            assert request.speculation is not None
            rows += [
                first + 1 + parent for parent in parents_of(request.draft_parents[: row.num_drafts], row.num_drafts)
            ]
            tokens += request.draft_token_ids[: row.num_drafts]
            is_typical += [int(request.speculation.acceptance == "typical")] * row.num_drafts
            own = request.params.top_p
            top_p += [own if own < 1.0 else config.acceptance_top_p] * row.num_drafts
        row_of = to_device(rows, torch.int64, device)
        probs = torch.softmax(logits[row_of] / draws.temperature[row_of][:, None], dim=-1)
        chosen = probs.gather(1, to_device(tokens, torch.int64, device)[:, None])
        above = probs > chosen
        entropy = -(probs * probs.clamp(min=1e-30).log()).sum(dim=-1)
        floor = (config.typical_alpha * torch.exp(-entropy)).clamp(max=config.typical_threshold)
        chosen = chosen[:, 0]
        is_likely = (probs * above).sum(dim=-1) < to_device(top_p, torch.float32, device)
        accepts = torch.where(to_device(is_typical, torch.int64, device) > 0, chosen > floor, is_likely & (chosen > 0))
        return chosen, above.sum(dim=-1), accepts

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


def _walk(
    parents: Sequence[int], drafts: list[int], taken: list[bool], weights: list[float], drawn: list[int]
) -> Verdict:
    """Along taken drafts, the longest way there is (of equals the likeliest); then the token drawn at its end."""
    reach = _best_runs(parents, taken)
    children = children_of_rows(parents, len(drafts))
    row, rows, token_ids = 0, [0], []
    while ways := [child for child in children[row] if taken[child - 1]]:
        row = max(ways, key=lambda child: (reach[child - 1], weights[child - 1]))
        rows.append(row)
        token_ids.append(drafts[row - 1])
    return Verdict([*token_ids, drawn[row]], rows)


def _best_runs(parents: Sequence[int], wanted: Sequence[bool]) -> list[int]:
    """Per draft, the most wanted drafts in a row below it."""
    runs = [0] * len(wanted)
    for draft, parent in reversed(list(enumerate(parents_of(parents, len(wanted))))):
        if parent >= 0 and wanted[draft]:
            runs[parent] = max(runs[parent], runs[draft] + 1)
    return runs
