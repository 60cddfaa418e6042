"""Speculation of one request, and how many drafts it may have now. Engine thread; numbers only.

The planner keeps speculation from slowing a loaded server down. Two things stop it: more rows than the device computes
for nothing beside reading its weights (free tokens), and a measured speed below that of plain steps. Both have
hysteresis, so that load at a threshold does not make it flap.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.core.drafts import row_depths
from slipstream.core.request import Request
from slipstream.core.stats import Metric, Stats, accepted_metric, drafted_metric

_LEAST_STEPS = 32  # measured steps before a speed is believed
_LEAST_GAIN = 1.0  # of tokens per second, below which speculation pauses
_REST_STEPS = 1024  # plain steps after which a paused speculation is tried again
_MOST_GROWTH = 3.0
_WEIGHT = 0.05  # of a new measurement in a running mean


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a request asked for, defaults filled in. num_draft_tokens: at least 1."""

    method: str
    num_draft_tokens: int
    acceptance: str


@dataclass(slots=True)
class _Mean:
    """A running mean; the first values weigh more."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """What takes far longer than before (something was compiled, another process ran) counts as a little longer."""
        if self.count:
            value = min(value, _MOST_GROWTH * self.value)
        self.count += 1
        self.value += (value - self.value) * max(_WEIGHT, 1.0 / self.count)


@dataclass(slots=True)
class _Load:
    """What was measured with about as many requests: seconds per token of one request, plain and speculating."""

    plain: _Mean = field(default_factory=_Mean)
    speculating: _Mean = field(default_factory=_Mean)
    num_rest_steps: int = 0

    def allows(self) -> bool:
        if self.num_rest_steps:
            return False
        if min(self.plain.count, self.speculating.count) < _LEAST_STEPS:
            return True
        return self.plain.value >= _LEAST_GAIN * self.speculating.value


class DraftPlanner:
    """free_tokens: rows of a step that cost about as much as one; 0 = do not limit.

    is_adaptive: also pause where speculation was measured to be slower.
    """

    def __init__(self, free_tokens: int = 0, is_adaptive: bool = False) -> None:
        self._free_tokens = free_tokens
        self._is_adaptive = is_adaptive
        self._loads: dict[int, _Load] = {}
        self._is_full = False  # too many requests for any draft
        self._num_most = 0  # drafts per request in this step

    def begin_step(self, num_running: int) -> None:
        """Decide for a step of so many requests."""
        self._num_most = self._num_affordable(num_running)
        if self._num_most and self._is_adaptive and not self._load(num_running).allows():
            self._num_most = 0

    def num_drafts(self, request: Request) -> int:
        """Most drafts that this request may have now."""
        wanted = request.speculation
        return 0 if wanted is None else min(wanted.num_draft_tokens, self._num_most)

    def expect(self, num_running: int, seconds: float) -> None:
        """What a plain step of so many requests takes at least, before any was seen."""
        load = self._load(num_running)
        load.plain.add(seconds)
        load.plain.count = max(load.plain.count, _LEAST_STEPS)

    def measure(self, num_running: int, seconds: float, tokens_per_request: float, is_speculating: bool) -> None:
        """A decode step of so many requests took so long; tokens_per_request: that each got, on average."""
        load = self._load(num_running)
        if is_speculating:
            load.speculating.add(seconds / tokens_per_request)
            if not load.allows():
                load.num_rest_steps = _REST_STEPS
                load.speculating = _Mean()
            return
        load.plain.add(seconds / tokens_per_request)
        load.num_rest_steps = max(0, load.num_rest_steps - 1)

    def _num_affordable(self, num_running: int) -> int:
        if not self._free_tokens:
            return 1 << 30
        num_free = self._free_tokens // max(1, num_running) - 1
        # one draft alone does not pay for the verification's overhead; it takes room for three to begin again
        self._is_full = num_free < (3 if self._is_full else 2)
        return 0 if self._is_full else num_free

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
