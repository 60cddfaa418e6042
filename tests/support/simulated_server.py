"""Simulates a server with the step times of one H200, to test the decisions of a DraftPlanner and their speed-up.

Times are those of the 8B shape in bf16 (docs/measurements), interpolated linearly. The planner gets those of an empty
cache and must measure the cost of 1,024 tokens of context, as on a server whose contexts are longer than at start.
Verifications of 128 rows and more are estimated from plain steps and products.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections import deque
from dataclasses import dataclass
from itertools import accumulate

from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.speculation import DraftPlanner, MeasuredStep, Speculation
from slipstream.core.step_costs import StepCosts

MS = 1e-3
PLAIN_EMPTY = ((1, 3.67), (2, 3.70), (4, 3.73), (8, 3.75), (16, 3.89), (32, 4.45), (64, 4.90), (128, 5.80))
VERIFY_EMPTY = (
    (2, 3.87), (4, 3.91), (8, 3.95), (16, 4.15), (32, 4.55), (64, 4.72), (128, 5.80), (256, 8.60), (512, 14.5),
)  # fmt: skip
DRAFTING = {
    "medusa": ((1, 0.58), (64, 1.10), (128, 1.70)),
    "mtp": ((1, 1.24), (16, 1.31), (64, 1.75), (128, 2.30)),
}
PLAIN_SURPLUS = ((1, 0.41), (2, 0.47), (4, 0.56), (8, 0.77), (16, 1.06), (32, 1.28), (64, 2.20), (128, 3.90))
# beyond a plain step's surplus, by requests: of each row more, from steps of 16, 62, 60, 56, 48, 96 rows more
SURPLUS_PER_ROW = ((1, 0.037), (2, 0.023), (4, 0.014), (8, 0.012), (16, 0.012), (32, 0.004), (64, 0.004), (128, 0.004))
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
MOST_ROWS_OF_A_GRAPH = 512


def on_line(points: tuple[tuple[int, float], ...], place: float) -> float:
    """Between two points, or on the line through the last two."""
    after = next((index for index, (x, _) in enumerate(points) if x >= place), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(0, after - 1)], points[max(1, after)]
    return points[0][1] if place <= points[0][0] else y0 + (y1 - y0) * (place - x0) / (x1 - x0)


def costs_of(method: str, most_drafts: int) -> StepCosts:
    """Costs as an engine measures them at start, of its captured graphs."""
    lengths = {1 + most_drafts, *(length for length in (2, 4, 8, 16, 32) if length <= most_drafts)}
    shapes = sorted(
        {(size * length, size, length) for size in SIZES for length in lengths if size * length <= MOST_ROWS_OF_A_GRAPH}
    )
    return StepCosts(
        tuple((size, on_line(PLAIN_EMPTY, size) * MS) for size in SIZES),
        tuple((*shape, on_line(VERIFY_EMPTY, shape[0]) * MS) for shape in shapes),
        {method: tuple((size, on_line(DRAFTING[method], size) * MS) for size in SIZES)},
    )


@dataclass
class Tally:
    """seconds, tokens: of the second half, after the planner has learned. chosen: drafts per request, by step."""

    chosen: list[int]
    seconds: float = 0.0
    tokens: float = 0.0

    @property
    def num_changes(self) -> int:
        half = self.chosen[len(self.chosen) // 2 :]
        return sum(half[step] != half[step - 1] for step in range(1, len(half)))


class SimulatedServer:
    """paths: for each draft of a tree, the ranks along its path; a chain: zeros. rates: as in profiles.py.
    surplus_share: 0.0 if steps take what they took at start."""

    def __init__(
        self,
        method: str,
        paths: list[tuple[int, ...]],
        rates: list[list[float]],
        seed: int = 0,
        surplus_share: float = 1.0,
    ) -> None:
        self.method, self._paths, self.rates = method, paths, rates
        self._surplus_share = surplus_share
        self.costs = costs_of(method, len(paths))
        self._dice = random.Random(seed)
        self.request = Request([1], SamplingParams())
        self.request.speculation = Speculation(method, len(paths), "exact")

    def seconds(self, num_requests: int, num_drafts: int, drafts_behind: bool) -> float:
        """The simulated seconds of a step."""
        surplus = self._surplus_share * on_line(PLAIN_SURPLUS, num_requests) * MS
        size = next(size for size in SIZES if size >= num_requests)
        if not drafts_behind:
            return on_line(PLAIN_EMPTY, size) * MS + surplus
        num_rows = num_requests * (1 + num_drafts)
        more = self._surplus_share * on_line(SURPLUS_PER_ROW, num_requests) * (num_rows - num_requests) * MS
        empty = self.costs.seconds(num_requests, max(2, num_rows), self.method)
        assert empty is not None, "more rows than any graph has room for"
        return empty + surplus + more

    def kept(self, num_drafts: int) -> list[int]:
        """Accepted rows of one request: row 1 + i is draft i."""
        rows, node = [0], ()
        places = {path: place for place, path in enumerate(self._paths[:num_drafts])}
        for level in self.rates:
            node = (*node, bisect(list(accumulate(level)), self._dice.random()))
            if node not in places:
                break
            rows.append(1 + places[node])
        return rows

    def expected(self, num_drafts: int) -> float:
        """Tokens of a verification."""
        tokens = 1.0
        for path in self._paths[:num_drafts]:
            chance = 1.0
            for level, rank in zip(self.rates, path):
                chance *= level[rank] if rank < len(level) else 0.0
            tokens += chance
        return tokens

    def run(self, planner: DraftPlanner, num_requests: int, num_steps: int, noise: float = 0.02) -> Tally:
        """Run steps of decodes, each launched ahead; times vary by `noise`."""
        tally, verified = Tally([]), deque([0])
        for step in range(num_steps):
            planner.begin_step(num_requests)
            behind, num_drafts = planner.num_drafts(self.request), verified.popleft()
            kept = [self.kept(num_drafts) for _ in range(num_requests)] if num_drafts else []
            for rows in kept:
                planner.observe(self.method, num_drafts, rows)
            tokens = sum(map(len, kept)) / num_requests if kept else 1.0
            took = self.seconds(num_requests, num_drafts, bool(num_drafts or behind)) * self._dice.uniform(1, 1 + noise)
            method = self.method if num_drafts or behind else ""
            planner.measure(MeasuredStep(num_requests, num_requests * (1 + num_drafts), took, tokens, method))
            verified.append(behind)
            tally.chosen.append(behind)
            if step >= num_steps // 2:
                tally.seconds, tally.tokens = tally.seconds + took, tally.tokens + tokens
        return tally
