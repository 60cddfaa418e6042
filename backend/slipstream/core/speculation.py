"""Speculation of one request, and how many drafts it may have now. Engine thread; numbers only.

The planner keeps speculation from slowing a loaded server down. What steps of so many rows take is measured at start,
how often drafts are taken as requests run: a step gets as many drafts as promise the most tokens a second, or none.
Beside that speculation pauses where it was measured to be slower than plain steps, with hysteresis. Each try that is
given up soon doubles the time to the next. Where nothing was measured at start, a number of rows that the device
computes for nothing beside reading its weights is the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.core.drafts import MAX_DRAFT_TOKENS, row_depths
from slipstream.core.request import Request
from slipstream.core.stats import Metric, Stats, accepted_metric, drafted_metric
from slipstream.core.step_costs import StepCosts, Surplus, bounded

_LEAST_STEPS = 32  # measured steps before a speed is believed
_LEAST_GAIN = 1.0  # of tokens per second, below which speculation pauses
_REST_STEPS = 1024  # plain steps after which a paused speculation is tried again, at first
_MOST_DOUBLINGS = 6  # of the time between two tries
_LASTING_DECISIONS = 64  # for drafts in a row, after which a try was not in vain
_MOST_GROWTH = 3.0
_WEIGHT = 0.05  # of a new measurement in a running mean
_REVIEW_STEPS = 16  # steps between two decisions on the number of drafts
_LEAST_PROMISE = 1.02  # of plain steps' tokens per second
_LEAST_CHANGE = 1.03  # of the tokens per second, for another number of drafts
_MOST_SEEN = 2000  # verifications of a draft, before older ones fade
_PRIOR_FIRST, _PRIOR_NEXT, _PRIOR_WEIGHT = 0.7, 0.8, 8.0  # how often drafts are right, before any were seen


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a request asked for, defaults filled in. num_draft_tokens: at least 1."""

    method: str
    num_draft_tokens: int
    acceptance: str


@dataclass(slots=True)
class _Speed:
    """Running means of what steps took and of the tokens that each request got; the first values weigh more."""

    seconds: float = 0.0
    tokens: float = 0.0
    count: int = 0

    def add(self, seconds: float, tokens: float) -> None:
        """What takes far longer than before (something was compiled, another process ran) counts as a little longer."""
        if self.count:
            seconds = min(seconds, _MOST_GROWTH * self.seconds)
        self.count += 1
        weight = max(_WEIGHT, 1.0 / self.count)
        self.seconds += (seconds - self.seconds) * weight
        self.tokens += (tokens - self.tokens) * weight

    @property
    def seconds_per_token(self) -> float:
        """Of the means: the mean of the quotients is what verifications with few tokens make it."""
        return self.seconds / self.tokens


@dataclass(slots=True)
class _Load:
    """What was measured with about as many requests, plain and speculating."""

    plain: _Speed = field(default_factory=_Speed)
    speculating: _Speed = field(default_factory=_Speed)
    surplus: Surplus = field(default_factory=Surplus)
    num_drafts: dict[tuple[str, int], int] = field(default_factory=dict)  # decided on last, by method and most
    num_rest_steps: int = 0
    num_lasting: int = 0  # decisions for drafts in a row
    num_vain: int = 0  # tries in a row that were given up soon

    @property
    def pace(self) -> int:
        """How many times further apart than at first tries are. Each costs: a draft model computes all contexts."""
        return 1 << min(_MOST_DOUBLINGS, max(0, self.num_vain - 1))

    def note_drafting(self, is_worthwhile: bool, was_drafting: bool) -> None:
        """A decision for this load, and what held before it."""
        if is_worthwhile:
            self.num_lasting += 1
            if self.num_lasting >= _LASTING_DECISIONS:
                self.num_vain = 0
        elif was_drafting:
            self.num_vain, self.num_lasting = self.num_vain + 1, 0

    def note_surplus(self, step: MeasuredStep, padded_rows: int, expected: float) -> None:
        if not step.method:
            self.surplus.note_plain(step.seconds, expected)
        elif step.num_rows > step.num_running:  # not the first step behind which something is drafted
            self.surplus.note_verified(padded_rows, step.num_running, step.seconds, expected)

    def allows(self) -> bool:
        if self.num_rest_steps:
            return False
        if min(self.plain.count, self.speculating.count) < _LEAST_STEPS:
            return True
        return self.plain.seconds_per_token >= _LEAST_GAIN * self.speculating.seconds_per_token


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of decodes alone. tokens_per_request: that each got, on average. method: "" if none may draft after it."""

    num_running: int
    num_rows: int
    seconds: float
    tokens_per_request: float
    method: str = ""


class DraftGains:
    """How much each draft of a list brings, the first counting most: how often it was on the way that was taken."""

    def __init__(self) -> None:
        self._num_seen = [0.0] * MAX_DRAFT_TOKENS  # verifications that had this draft
        self._num_taken = [0.0] * MAX_DRAFT_TOKENS
        self._news = [0] * (MAX_DRAFT_TOKENS + 1)  # verifications by their number of drafts, not yet in _num_seen

    def add(self, num_drafts: int, rows: Sequence[int]) -> None:
        """rows: kept, of which row 1 + i is draft i."""
        self._news[num_drafts] += 1
        for row in rows:
            if row:
                self._num_taken[row - 1] += 1

    def expected_tokens(self, most: int) -> list[float]:
        """By number of drafts, 0 to `most`: tokens of a verification. What was not seen yet is thought well of, but
        not better than the draft before it: lists are given with the best first."""
        self._take_in()
        tokens, last = [1.0], 1.0
        for draft in range(most):
            prior = min(last, _PRIOR_FIRST * _PRIOR_NEXT**draft)
            last = (self._num_taken[draft] + _PRIOR_WEIGHT * prior) / (self._num_seen[draft] + _PRIOR_WEIGHT)
            tokens.append(tokens[-1] + last)
        return tokens

    def _take_in(self) -> None:
        """Old verifications of a draft fade as new ones come, but not while there are none: what was found out about
        long lists holds while short ones are drafted."""
        num_new = 0
        for draft in reversed(range(MAX_DRAFT_TOKENS)):
            num_new += self._news[draft + 1]
            self._num_seen[draft] += num_new
            if self._num_seen[draft] > _MOST_SEEN:
                fading = 0.5 * _MOST_SEEN / self._num_seen[draft]
                self._num_seen[draft] *= fading
                self._num_taken[draft] *= fading
        self._news = [0] * (MAX_DRAFT_TOKENS + 1)


class DraftPlanner:
    """free_tokens: rows of a step that cost about as much as one; 0 = do not limit.

    is_adaptive: also pause where speculation was measured to be slower. costs: what steps take, if that was measured:
    then the number of drafts is the one that promises the most tokens a second.
    """

    def __init__(self, free_tokens: int = 0, is_adaptive: bool = False, costs: StepCosts | None = None) -> None:
        self._free_tokens = free_tokens
        self._is_adaptive = is_adaptive
        self._costs = costs
        self._loads: dict[int, _Load] = {}
        self._gains: dict[str, DraftGains] = {}
        self._is_full = False  # too many requests for any draft
        self._num_running = 0
        self._num_most = 0  # drafts per request in this step
        self._best: dict[tuple[str, int], int] = {}  # by method and drafts wanted, for about this load
        self._num_steps = 0

    def begin_step(self, num_running: int) -> None:
        """Decide for a step of so many requests."""
        self._num_most = self._num_affordable(num_running)
        if self._num_most and self._is_adaptive and not self._load(num_running).allows():
            self._num_most = 0
        self._num_steps += 1
        if num_running != self._num_running or self._num_steps % _REVIEW_STEPS == 0:
            self._num_running = num_running
            self._best.clear()

    def num_drafts(self, request: Request) -> int:
        """Most drafts that this request may have now."""
        wanted = request.speculation
        if wanted is None:
            return 0
        most = min(wanted.num_draft_tokens, self._num_most)
        if self._costs is None or not most:
            return most
        key = wanted.method, most
        if key not in self._best:
            self._best[key] = self._most_useful(*key)
        return self._best[key]

    def observe(self, method: str, num_drafts: int, rows: Sequence[int]) -> None:
        """A verification of so many drafts kept these rows, of which row 1 + i is draft i."""
        self._gains_of(method).add(num_drafts, rows)

    def measure(self, step: MeasuredStep) -> None:
        """A decode step that went by."""
        load, seconds = self._load(step.num_running), step.seconds
        if self._costs is not None:
            expected = self._costs.seconds(step.num_running, step.num_rows, step.method)
            if expected is not None:
                load.note_surplus(step, self._costs.padded_rows(step.num_rows, step.num_running), expected)
                seconds = bounded(seconds, expected)
        if step.method:
            load.speculating.add(seconds, step.tokens_per_request)
            if not load.allows():
                if not load.num_rest_steps:  # some are in flight when it is given up
                    load.note_drafting(is_worthwhile=False, was_drafting=True)
                load.num_rest_steps = _REST_STEPS * load.pace
                load.speculating = _Speed()
            return
        load.plain.add(seconds, step.tokens_per_request)
        load.num_rest_steps = max(0, load.num_rest_steps - 1)

    def promises(self, method: str, most: int) -> dict[int, float]:
        """Tokens a second of one request, by its number of drafts, up to `most`, at the load of this step: 0 is plain.

        Of those numbers that some graph is made for; empty if no graph has room for so many requests."""
        assert self._costs is not None
        count, load = max(1, self._num_running), self._load(self._num_running)
        plain = self._costs.seconds(count, count, "")
        if plain is None:
            return {}
        rates = {0: 1.0 / bounded(plain + load.surplus.plain, plain)}
        expected = self._gains_of(method).expected_tokens(most)
        for num_rows in self._row_counts(count, 1 + most):
            seconds = self._costs.seconds(count, count * num_rows, method)
            if seconds is not None:
                surplus = load.surplus.verified(self._costs.padded_rows(count * num_rows, count), count)
                rates[num_rows - 1] = expected[num_rows - 1] / bounded(seconds + surplus, seconds)
        return rates

    def _row_counts(self, num_requests: int, most: int) -> set[int]:
        """Rows of a request, up to `most`, with which so many requests fill a verification that has a graph."""
        assert self._costs is not None
        fits = [
            min(rows // num_requests, longest)
            for rows, count, longest, _ in self._costs.verified
            if count >= num_requests
        ]
        return {min(rows, most) for rows in fits if rows >= 2}

    def _most_useful(self, method: str, most: int) -> int:
        """The number of drafts, up to `most`, that promises the most tokens a second at this load; 0 if none does."""
        rates, load = self.promises(method, most), self._load(self._num_running)
        if not rates:
            return 0  # more requests than any graph has room for
        plain = rates[0]
        rates[0] *= _LEAST_PROMISE
        best, former = max(rates, key=lambda number: rates[number]), load.num_drafts.get((method, most))
        if former in rates and rates[former] >= plain and rates[best] < _LEAST_CHANGE * rates[former]:
            best = former  # a change costs the verification that was launched ahead
        load.num_drafts[method, most] = best
        load.note_drafting(bool(best), bool(former))
        if not best:
            load.surplus.forgive(load.pace)
        return best

    def _num_affordable(self, num_running: int) -> int:
        if not self._free_tokens:
            return 1 << 30
        num_free = self._free_tokens // max(1, num_running) - 1
        # one draft alone does not pay for the verification's overhead; it takes room for three to begin again
        self._is_full = num_free < (3 if self._is_full else 2)
        return 0 if self._is_full else num_free

    def _gains_of(self, method: str) -> DraftGains:
        return self._gains.setdefault(method, DraftGains())

    def _load(self, num_running: int) -> _Load:
        """Loads are told apart by powers of two."""
        return self._loads.setdefault(num_running.bit_length(), _Load())


def settle_drafts(request: Request, num_new: int, stats: Stats) -> None:
    """Count what became of a request's drafts, of which num_new - 1 were accepted, and drop them."""
    num_drafted, num_accepted = len(request.draft_token_ids), num_new - 1
    assert num_accepted <= num_drafted, "more tokens than drafts and one"
    request.num_drafted_tokens += num_drafted
    request.num_accepted_tokens += num_accepted
    stats.add(Metric.DRAFTED_TOKENS, num_drafted)
    stats.add(Metric.ACCEPTED_TOKENS, num_accepted)
    if request.speculation is not None:
        method = request.speculation.method
        for position in range(1, max(row_depths(request.draft_parents, num_drafted)) + 1):
            stats.add(drafted_metric(method, position))
            if position <= num_accepted:
                stats.add(accepted_metric(method, position))
    request.drop_drafts()


def clip_drafts(request: Request, num_most: int) -> int:
    """Keep the first num_most drafts, and as many as the request's own end allows (one more token follows them).

    Returns how many are left. A parent stands before its children, so what is left of a tree is a tree.
    """
    num_most = max(0, min(num_most, request.stop_conditions.max_len - request.num_tokens - 1))
    if num_most == 0:
        request.drop_drafts()
    del request.draft_token_ids[num_most:], request.draft_parents[num_most:]
    return len(request.draft_token_ids)
