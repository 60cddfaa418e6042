"""Chooses the number of draft tokens per request, so that speculation does not slow a loaded server down.

Engine thread; numbers only. Step times by number of rows are measured at start, acceptance rates at run time; each step
gets the number of drafts with the highest expected tokens per second, possibly 0. Speculation also pauses, with
hysteresis, at loads where it was measured to be slower than plain steps; each short-lived retry doubles the pause.
Without times measured at start, the limit is the number of rows that cost no more than reading the weights.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.core.drafts import MAX_DRAFT_TOKENS, max_depth
from slipstream.core.request import Request
from slipstream.core.stats import Metric, Stats, accepted_metric, drafted_metric
from slipstream.core.step_costs import DECAY, StepCosts, Surplus, bounded

_MIN_STEPS = 32  # measured steps before a mean speed is used
_TRIAL_STEPS = 48  # plain steps measured where drafters find too few drafts
_MIN_GAIN = 1.0  # speculation pauses below this ratio of tokens per second to plain steps
_PAUSE_STEPS = 1024  # plain steps of the first pause
_MAX_DOUBLINGS = 6  # of the pause
_LASTING_DECISIONS = 64  # consecutive decisions for drafts after which a retry has succeeded
_LASTING_STEPS = 1024  # likewise of measured steps that draft
_MAX_GROWTH = 3.0  # a step counts as at most this many times the mean
_WEIGHT = 0.05  # weight of a new measurement in a running mean
_REVIEW_STEPS = 16  # steps between two decisions on the number of drafts
_MIN_EXPECTED_GAIN = 1.02  # expected tokens per second relative to plain steps for which drafting starts
_MIN_CHANGE_GAIN = 1.03  # gain in tokens per second for which the number of drafts changes
_MAX_SEEN = 2000  # verifications of a draft position after which counts are halved
_PRIOR_FIRST, _PRIOR_NEXT, _PRIOR_WEIGHT = 0.7, 0.8, 8.0  # acceptance rate of draft 0, ratio to the next, pseudo-count


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculation settings of a request, with defaults filled in. num_draft_tokens >= 1.

    may_run_ahead: whether its parameters allow a verification before the host has read the one before it.
    """

    method: str
    num_draft_tokens: int
    acceptance: str
    may_run_ahead: bool = False


@dataclass(slots=True)
class _Speed:
    """Running means of seconds per step and tokens per request and step; the first values weigh more."""

    seconds: float = 0.0
    tokens: float = 0.0
    count: int = 0

    def add(self, seconds: float, tokens: float) -> None:
        """Add a step; outliers (a compilation, another process) are clamped to _MAX_GROWTH times the mean."""
        if self.count:
            seconds = min(seconds, _MAX_GROWTH * self.seconds)
        self.count += 1
        weight = max(_WEIGHT, 1.0 / self.count)
        self.seconds += (seconds - self.seconds) * weight
        self.tokens += (tokens - self.tokens) * weight

    @property
    def seconds_per_token(self) -> float:
        """Ratio of the means; a mean of ratios would be dominated by verifications that accept few tokens."""
        return self.seconds / self.tokens


@dataclass(slots=True)
class _Load:
    """Measurements at one load: numbers of running requests with the same bit length."""

    plain: _Speed = field(default_factory=_Speed)
    speculating: _Speed = field(default_factory=_Speed)
    num_empty: int = 0  # of the speculating steps: those that had no draft to verify
    surplus: Surplus = field(default_factory=Surplus)
    num_drafts: dict[tuple[str, int], int] = field(default_factory=dict)  # last decision by (method, max drafts)
    num_pause_steps: int = 0
    num_lasting: int = 0  # consecutive decisions for drafts
    num_failed: int = 0  # consecutive short-lived retries

    @property
    def backoff(self) -> int:
        """Factor on the pause between retries. A retry is expensive: a draft model computes all contexts."""
        return 1 << min(_MAX_DOUBLINGS, max(0, self.num_failed - 1))

    def note_drafting(self, is_worthwhile: bool, was_drafting: bool) -> None:
        """Record a decision for or against drafts at this load. was_drafting: the decision before it."""
        if is_worthwhile:
            self.num_lasting += 1
            if self.num_lasting >= _LASTING_DECISIONS:
                self.num_failed = 0
        elif was_drafting:
            self.num_failed, self.num_lasting = self.num_failed + 1, 0

    def note_surplus(self, step: MeasuredStep, padded_rows: int, expected: float) -> None:
        if not step.method:
            self.surplus.note_plain(step.seconds, expected)
        elif step.num_rows > step.num_running:  # excludes a plain step that drafts for the first time
            self.surplus.note_verified(padded_rows, step.num_running, step.seconds, expected)

    def is_slower(self) -> bool:
        """Whether speculation was measured to be slower than plain steps."""
        if min(self.plain.count, self.speculating.count) < _MIN_STEPS:
            return False
        return self.plain.seconds_per_token < _MIN_GAIN * self.speculating.seconds_per_token

    def needs_trial(self, plain_seconds: float) -> bool:
        """Whether to measure plain steps: most steps had no draft to verify, and tokens take longer than plain steps
        did at start. Such a step waits for the host to look for drafts, which neither acceptance nor costs show."""
        if self.plain.count >= _MIN_STEPS or self.speculating.count < _MIN_STEPS or self.num_pause_steps:
            return False
        return 2 * self.num_empty > self.speculating.count and plain_seconds < self.speculating.seconds_per_token

    def pause(self) -> None:
        if not self.num_pause_steps:  # steps still in flight count once
            if self.speculating.count >= _LASTING_STEPS:  # without costs nothing is decided that `note_drafting` counts
                self.num_failed = 0
            self.note_drafting(is_worthwhile=False, was_drafting=True)
        self.num_pause_steps = _PAUSE_STEPS * self.backoff
        self.speculating, self.num_empty = _Speed(), 0


@dataclass(slots=True)
class MeasuredStep:
    """A step of decodes only. tokens_per_request: mean over the requests. method: "" if nothing is drafted after it.
    context: cached tokens of each request, on average; None: not known."""

    num_running: int
    num_rows: int
    seconds: float
    tokens_per_request: float
    method: str = ""
    context: int | None = None


class DraftGains:
    """Acceptance rate of each draft position, measured over verifications; drafts are ordered best first."""

    def __init__(self) -> None:
        self._num_seen = [0.0] * MAX_DRAFT_TOKENS  # verifications that had this draft
        self._num_accepted = [0.0] * MAX_DRAFT_TOKENS  # verifications that accepted it
        self._new_counts = [0] * (MAX_DRAFT_TOKENS + 1)  # verifications by number of drafts, not yet added to _num_seen

    def add(self, num_drafts: int, rows: Sequence[int], count: int = 1) -> None:
        """Record `count` verifications. rows: the accepted rows; row 1 + i is draft i."""
        self._new_counts[num_drafts] += count
        for row in rows:
            if row:
                self._num_accepted[row - 1] += count

    def expected_tokens(self, most: int) -> list[float]:
        """Expected tokens of a verification for 0..most drafts, [1 + most].

        The prior of a position is optimistic but at most the rate of the position before it."""
        self._add_new_counts()
        tokens, last = [1.0], 1.0
        for draft in range(most):
            prior = min(last, _PRIOR_FIRST * _PRIOR_NEXT**draft)
            last = (self._num_accepted[draft] + _PRIOR_WEIGHT * prior) / (self._num_seen[draft] + _PRIOR_WEIGHT)
            tokens.append(tokens[-1] + last)
        return tokens

    def fade(self, backoff: int) -> None:
        """Weigh what was measured a little less, while nothing is drafted: the next texts may be more predictable, and
        without a retry nothing would show it. backoff: divides the rate, as in `Surplus.decay`."""
        share = 1.0 - (1.0 - DECAY) / backoff
        self._num_seen = [share * count for count in self._num_seen]
        self._num_accepted = [share * count for count in self._num_accepted]

    def _add_new_counts(self) -> None:
        """Add new verifications to the counts and halve large counts. Positions that are not drafted keep theirs."""
        num_new = 0
        for draft in reversed(range(MAX_DRAFT_TOKENS)):
            num_new += self._new_counts[draft + 1]
            self._num_seen[draft] += num_new
            if self._num_seen[draft] > _MAX_SEEN:
                fading = 0.5 * _MAX_SEEN / self._num_seen[draft]
                self._num_seen[draft] *= fading
                self._num_accepted[draft] *= fading
        self._new_counts = [0] * (MAX_DRAFT_TOKENS + 1)


class DraftPlanner:
    """free_tokens: rows of a step that cost about as much as one row; 0 = no limit.

    is_adaptive: pause speculation at loads where it was measured to be slower. costs: step times measured at start,
    by which the number of drafts maximises the expected tokens per second.
    """

    def __init__(self, free_tokens: int = 0, is_adaptive: bool = False, costs: StepCosts | None = None) -> None:
        self._free_tokens = free_tokens
        self._is_adaptive = is_adaptive
        self._costs = costs
        self._loads: defaultdict[int, _Load] = defaultdict(_Load)
        self._gains: defaultdict[str, DraftGains] = defaultdict(DraftGains)
        self._is_full = False  # too many requests for any draft
        self._num_running = 0
        self._context: int | None = None  # of the last measured step
        self._found: defaultdict[str, float] = defaultdict(lambda: 1.0)  # share of the wanted drafts that are found
        self._max_drafts = 0  # max drafts per request in this step
        self._best: dict[tuple[str, int], int] = {}  # number of drafts by (method, max drafts) at this load
        self._num_steps = 0

    def begin_step(self, num_running: int) -> None:
        """Set the limit of drafts per request for a step with num_running requests."""
        self._max_drafts = self._num_affordable(num_running)
        if self._max_drafts and self._is_adaptive and self._load(num_running).num_pause_steps:
            self._max_drafts = 0
        self._num_steps += 1
        if num_running != self._num_running or self._num_steps % _REVIEW_STEPS == 0:
            self._num_running = num_running
            self._best.clear()

    def num_drafts(self, request: Request) -> int:
        """Max number of drafts of this request in this step."""
        return 0 if request.speculation is None else self.num_drafts_of(request.speculation)

    def num_drafts_of(self, wanted: Speculation) -> int:
        """The same of any request with these settings."""
        most = wanted.num_draft_tokens
        if most > self._max_drafts:
            most = self._max_drafts
        if self._costs is None or not most:
            return most
        key = wanted.method, most
        best = self._best.get(key)
        if best is None:
            best = self._best[key] = self._most_useful(*key)
        return best

    def observe(self, method: str, num_drafts: int, rows: Sequence[int], count: int = 1) -> None:
        """Record `count` verifications of num_drafts drafts. rows: the accepted rows; row 1 + i is draft i."""
        self._gains[method].add(num_drafts, rows, count)

    def note_found(self, method: str, num_wanted: int, num_found: int) -> None:
        """Record how many of the drafts that a step's requests may have were made: n-grams find some for a part of the
        requests only, and verifications have fewer rows."""
        if num_wanted:
            self._found[method] += (num_found / num_wanted - self._found[method]) * _WEIGHT

    def measure(self, step: MeasuredStep) -> None:
        """Record a decode step."""
        load, seconds, self._context = self._load(step.num_running), step.seconds, step.context
        if self._costs is not None:
            expected = self._costs.seconds(step.num_running, step.num_rows, step.method, step.context)
            if expected is not None:
                load.note_surplus(step, self._costs.padded_rows(step.num_rows, step.num_running), expected)
                seconds = bounded(seconds, expected)
        if step.method:
            load.speculating.add(seconds, step.tokens_per_request)
            load.num_empty += step.num_rows == step.num_running
            plain = self._costs and self._costs.seconds(step.num_running, step.num_running, "", step.context)
            if plain and load.needs_trial(plain):
                load.num_pause_steps = _TRIAL_STEPS
        else:
            load.plain.add(seconds, step.tokens_per_request)
            load.num_pause_steps = max(0, load.num_pause_steps - 1)
        if load.is_slower():
            load.pause()

    def promises(self, method: str, most: int) -> dict[int, float]:
        """Expected tokens per second of a request by number of drafts (0..most, 0 is plain) at this step's load.

        Only numbers of drafts that fill a captured graph; empty if no graph fits the number of requests."""
        assert self._costs is not None
        count, load = max(1, self._num_running), self._load(self._num_running)
        plain = self._costs.seconds(count, count, "", self._context)
        if plain is None:
            return {}
        rates = {0: 1.0 / bounded(plain + load.surplus.plain, plain)}
        expected = self._gains[method].expected_tokens(most)
        for num_rows in self._row_counts(count, 1 + most):
            num_verified = count + max(1, round(count * (num_rows - 1) * self._found[method]))
            seconds = self._costs.seconds(count, num_verified, method, self._context)
            if seconds is not None:
                surplus = load.surplus.verified(self._costs.padded_rows(num_verified, count), count)
                rates[num_rows - 1] = expected[num_rows - 1] / bounded(seconds + surplus, seconds)
        return rates

    def _row_counts(self, num_requests: int, most: int) -> set[int]:
        """Rows per request (2..most) with which num_requests requests fill a captured verification."""
        assert self._costs is not None
        fits = [
            min(rows // num_requests, longest)
            for rows, count, longest, _ in self._costs.verified
            if count >= num_requests
        ]
        return {min(rows, most) for rows in fits if rows >= 2}

    def _most_useful(self, method: str, most: int) -> int:
        """The number of drafts in 0..most with the highest expected tokens per second at this load."""
        rates, load = self.promises(method, most), self._load(self._num_running)
        if not rates:
            return 0  # no captured graph fits the number of requests
        plain = rates[0]
        rates[0] *= _MIN_EXPECTED_GAIN
        best, former = max(rates, key=lambda number: rates[number]), load.num_drafts.get((method, most))
        if former in rates and rates[former] >= plain and rates[best] < _MIN_CHANGE_GAIN * rates[former]:
            best = former  # a change discards the verification that was launched ahead
        load.num_drafts[method, most] = best
        load.note_drafting(bool(best), bool(former))
        if not best:
            load.surplus.decay(load.backoff)
            self._gains[method].fade(load.backoff)
        return best

    def _num_affordable(self, num_running: int) -> int:
        if not self._free_tokens:
            return 1 << 30
        num_free = self._free_tokens // max(1, num_running) - 1
        # one draft does not pay for the verification's overhead; hysteresis: start again at three
        self._is_full = num_free < (3 if self._is_full else 2)
        return 0 if self._is_full else num_free

    def _load(self, num_running: int) -> _Load:
        """The measurements for this number of requests, rounded to a power of two."""
        return self._loads[num_running.bit_length()]


class VerifiedDrafts:
    """The verifications of a step, counted together where they are alike: most of its requests have all in common, and
    each has a counter a position."""

    def __init__(self) -> None:
        self._found: list[tuple[str, int, int, int]] = []  # method, number of drafts, depth, accepted ones

    def add(self, request: Request, num_new: int) -> None:
        """Count a request's verified drafts, of which num_new - 1 were accepted, and drop them."""
        num_drafted, num_accepted, speculation = len(request.draft_token_ids), num_new - 1, request.speculation
        assert num_accepted <= num_drafted, "more tokens than drafts and one"
        request.num_drafted_tokens += num_drafted
        request.num_accepted_tokens += num_accepted
        depth = max_depth(request.draft_parents, num_drafted)
        method = "" if speculation is None else speculation.method
        self._found.append((method, num_drafted, depth, num_accepted))
        request.drop_drafts()

    def record(self, stats: Stats) -> None:
        for (method, num_drafted, depth, num_accepted), count in Counter(self._found).items():
            record_verified(stats, method, num_drafted, depth, num_accepted, count)


def record_verified(stats: Stats, method: str, num_drafted: int, depth: int, num_accepted: int, count: int) -> None:
    """Count `count` verifications alike. depth: of the deepest draft."""
    stats.add(Metric.DRAFTED_TOKENS, count * num_drafted)
    stats.add(Metric.ACCEPTED_TOKENS, count * num_accepted)
    for position in range(1, depth + 1) if method else ():
        stats.add(drafted_metric(method, position), count)
        if position <= num_accepted:
            stats.add(accepted_metric(method, position), count)


def truncate_drafts(request: Request, max_drafts: int) -> int:
    """Keep at most max_drafts drafts, and no more than the request's max_len allows with the token after them.

    Returns the number of drafts left. Parents precede their children, so a truncated tree is a tree.
    """
    num_drafts, num_left = len(request.draft_token_ids), request.stop_conditions.max_len - len(request.token_ids) - 1
    if num_drafts > max_drafts or num_drafts > num_left:
        num_drafts = max_drafts = max(0, min(max_drafts, num_left))
        request.draft_token_ids = request.draft_token_ids[:max_drafts]  # the drafter's own lists
        request.draft_parents = request.draft_parents[:max_drafts]
    return num_drafts
