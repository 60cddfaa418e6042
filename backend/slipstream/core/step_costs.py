"""Step times: seconds measured at start, plus running means of the excess at run time. Engine thread; numbers only."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

_MAX_SURPLUS = 2.0  # relative to the expected seconds
_MAX_HOST_SECONDS = 0.01  # lower limit of the largest surplus: host time of models with very short steps
_MIN_SURPLUS = -0.5  # relative to the expected seconds
DECAY = 0.98  # of what was measured of drafts, at each decision against them
_LEAST_SHARE = 0.25  # of a step's seconds, that short contexts leave
_PLAIN_SHARE = 0.5  # of the surplus of verifications: what their first row takes, until a plain step is measured
_NUM_RECENT = 15  # measurements of which the median counts
_MAX_AGE = 4096  # verifications after which an older measurement at the same load is dropped


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds on the device, measured at start with about 1,000 cached tokens per request.

    plain: (requests, seconds), ascending. verified: (rows, requests, max rows of a request, seconds), ascending; with
    equal rows, more requests read more keys. drafting: method -> (requests, seconds), ascending. A step costs as much
    as the first entry that holds its rows, its requests and the rows of each request. cached_token: seconds that a step
    takes for each cached token of its requests; context: how many each had when the others were measured.
    """

    plain: tuple[tuple[int, float], ...]
    verified: tuple[tuple[int, int, int, float], ...]
    drafting: Mapping[str, tuple[tuple[int, float], ...]]
    cached_token: float = 0.0
    context: int = 0

    def seconds(self, num_requests: int, num_rows: int, method: str, context: int | None = None) -> float | None:
        """Seconds of a step and the drafting after it; None if it is larger than all that were measured.

        num_rows == num_requests: the step verifies no drafts. context: cached tokens of each request, on average; None:
        as measured."""
        drafting = self.drafting.get(method, ())
        behind = _at_least(drafting, num_requests) if drafting else 0.0
        if num_rows > num_requests:
            found = self._padded(num_rows, num_requests)
            step = None if found is None else found[1]
        else:
            step = _at_least(self.plain, num_requests)
        if step is None or behind is None:
            return None
        if context is not None:
            step = max(_LEAST_SHARE * step, step + self.cached_token * num_requests * (context - self.context))
        return step + behind

    def padded_rows(self, num_rows: int, num_requests: int) -> int:
        """Rows that the padded verification of num_rows rows computes."""
        found = self._padded(num_rows, num_requests)
        return num_rows if found is None else found[0]

    def _padded(self, num_rows: int, num_requests: int) -> tuple[int, float] | None:
        """Rows and seconds of the first entry that fits."""
        each = -(-num_rows // num_requests)
        fits = (
            (rows, took)
            for rows, count, most, took in self.verified
            if rows >= num_rows and count >= num_requests and most >= each
        )
        return next(fits, None)


class _Median:
    """Median of the last measurements: outliers (a compilation, another process) do not move it, and three others do.

    first: an estimate, which counts as one."""

    def __init__(self, first: float = 0.0) -> None:
        self._recent = deque([first], _NUM_RECENT)
        self.value = first
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        self._recent.append(value)
        self.value = median_low(self._recent)

    def decay(self, factor: float) -> None:
        self._recent = deque((factor * value for value in self._recent), _NUM_RECENT)
        self.value *= factor


class Surplus:
    """Seconds that steps take beyond StepCosts (long contexts, host time), for plain steps and for each number of
    verified rows: attention costs a tree of 64 rows more than one of 8.

    Numbers of rows without a measurement are interpolated linearly; plain steps are the first point.
    """

    def __init__(self) -> None:
        self._plain = _Median()
        self._verified: dict[int, _Median] = {}
        self._noted_at: dict[int, int] = {}
        self._num_noted = 0

    @property
    def plain(self) -> float:
        """Until one is measured, what verifications take less than expected, and not what they take more: the host
        launches plain steps ahead, and reads a verification before the next."""
        if self._plain.count or not self._verified:
            return self._plain.value
        return min(0.0, *(measured.value for measured in self._verified.values()))

    def note_plain(self, seconds: float, expected: float) -> None:
        """Record a plain step. seconds: measured. expected: by StepCosts."""
        self._plain.add(_surplus(seconds, expected))

    def note_verified(self, num_rows: int, num_requests: int, seconds: float, expected: float) -> None:
        known = self._verified.get(num_rows)
        if known is None:
            known = self._verified[num_rows] = _Median(self.verified(num_rows, num_requests))
        known.add(_surplus(seconds, expected))
        self._num_noted += 1
        self._noted_at[num_rows] = self._num_noted
        for rows in [rows for rows, noted in self._noted_at.items() if noted < self._num_noted - _MAX_AGE]:
            del self._noted_at[rows], self._verified[rows]  # contexts and requests have changed since

    def verified(self, num_rows: int, num_requests: int) -> float:
        """Surplus seconds of a verification of num_rows rows, of which num_requests are the last tokens."""
        known = sorted((rows, measured.value) for rows, measured in self._verified.items() if rows > num_requests)
        plain = self.plain
        if known and not self._plain.count:
            plain = _PLAIN_SHARE * known[0][1]
        points = [(num_requests, plain), *known]
        index = next((index for index, (rows, _) in enumerate(points) if rows >= num_rows), len(points) - 1)
        (start, low), (end, high) = points[max(0, index - 1)], points[index]
        if start == end or num_rows == end:
            return high
        rise = (high - low) / (end - start)
        if num_rows > end:
            return high + max(0.0, rise) * (num_rows - end)  # more rows never cost less
        return low + rise * (num_rows - start)

    def decay(self, backoff: int = 1) -> None:
        """Reduce the surplus of verifications, so that row counts that were slow once are tried again.

        backoff: divides the rate of decay."""
        for measured in self._verified.values():
            measured.decay(1.0 - (1.0 - DECAY) / backoff)


def _surplus(seconds: float, expected: float) -> float:
    return min(max(_MIN_SURPLUS * expected, seconds - expected), max(_MAX_SURPLUS * expected, _MAX_HOST_SECONDS))


def bounded(seconds: float, expected: float) -> float:
    """Seconds of a step with outliers clamped."""
    return expected + _surplus(seconds, expected)


def _at_least(pairs: Sequence[tuple[int, float]], size: int) -> float | None:
    return next((seconds for known, seconds in pairs if known >= size), None)
