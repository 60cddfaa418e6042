"""What steps take: seconds measured at start, and what they were found to take beyond. Engine thread; numbers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WEIGHT = 0.05  # of a new measurement in a running mean
_MOST_SURPLUS = 2.0  # of the seconds expected, or the host's:
_MOST_HOST_SECONDS = 0.01  # that a step may take beyond the device's, of a model whose steps are shorter than that
_LEAST_SURPLUS = -0.5
_FORGIVENESS = 0.98
_LEAST_MOVE = 0.25  # of the seconds expected: how far off a step may be and still count as it is
_PLAIN_SHARE = 0.5  # of a verification's surplus: what is thought of plain steps' before any were seen
_PRIOR_STEPS = 4  # for which a first estimate counts
_MOST_AGE = 4096  # verifications at a load, before what others took there is forgotten


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds on the device, measured at start with about a thousand tokens of each request in the cache.

    plain: (requests, seconds), ascending. verified: (rows, requests, most rows of a request, seconds), ascending: of as
    many rows, those of many requests have more keys to read. drafting: by method, (requests, seconds). A step is padded
    to the next that has room for its rows, its requests and the rows of each.
    """

    plain: tuple[tuple[int, float], ...]
    verified: tuple[tuple[int, int, int, float], ...]
    drafting: Mapping[str, tuple[tuple[int, float], ...]]

    def seconds(self, num_requests: int, num_rows: int, method: str) -> float | None:
        """Of a step and the drafting behind it; None for one that is larger than what was measured.

        A step of as many rows as requests verifies nothing, though something may be drafted behind it."""
        drafting = self.drafting.get(method, ())
        behind = _at_least(drafting, num_requests) if drafting else 0.0
        if num_rows > num_requests:
            found = self._padded(num_rows, num_requests)
            step = None if found is None else found[1]
        else:
            step = _at_least(self.plain, num_requests)
        return None if step is None or behind is None else step + behind

    def padded_rows(self, num_rows: int, num_requests: int) -> int:
        """Rows that a verification of so many computes."""
        found = self._padded(num_rows, num_requests)
        return num_rows if found is None else found[0]

    def _padded(self, num_rows: int, num_requests: int) -> tuple[int, float] | None:
        """Rows and seconds of the first that has room."""
        each = -(-num_rows // num_requests)
        fits = (
            (rows, took)
            for rows, count, most, took in self.verified
            if rows >= num_rows and count >= num_requests and most >= each
        )
        return next(fits, None)


@dataclass(slots=True)
class _Steady:
    """A value that is approached: one that is far off (something was compiled) moves it little."""

    value: float = 0.0
    count: int = 0

    def approach(self, value: float, least_move: float) -> None:
        self.count += 1
        most = max(abs(self.value), least_move)
        self.value += max(_WEIGHT, 1.0 / (_PRIOR_STEPS + self.count)) * min(most, max(-most, value - self.value))


class Surplus:
    """Seconds that steps take beyond what StepCosts say: long contexts, the host. Kept for plain steps and for each
    number of rows that was verified, because attention costs a tree of 64 rows more than one of 8.

    What was not verified yet lies on the line between its neighbours, of which plain steps are one: a number of rows
    that looks good is tried, and then judged by what it took.
    """

    def __init__(self) -> None:
        self._plain = _Steady()
        self._verified: dict[int, _Steady] = {}
        self._noted_at: dict[int, int] = {}
        self._num_noted = 0

    @property
    def plain(self) -> float:
        return self._plain.value

    def note_plain(self, seconds: float, expected: float) -> None:
        """A step was expected to take so long."""
        self._plain.approach(_surplus(seconds, expected), _LEAST_MOVE * expected)

    def note_verified(self, num_rows: int, num_requests: int, seconds: float, expected: float) -> None:
        known = self._verified.get(num_rows)
        if known is None:
            known = self._verified[num_rows] = _Steady(self.verified(num_rows, num_requests))
        known.approach(_surplus(seconds, expected), _LEAST_MOVE * expected)
        self._num_noted += 1
        self._noted_at[num_rows] = self._num_noted
        for rows in [rows for rows, noted in self._noted_at.items() if noted < self._num_noted - _MOST_AGE]:
            del self._noted_at[rows], self._verified[rows]  # contexts grow, other requests come

    def verified(self, num_rows: int, num_requests: int) -> float:
        """Of a verification of so many rows, of which so many are there anyhow."""
        known = sorted((rows, steady.value) for rows, steady in self._verified.items() if rows > num_requests)
        plain = self.plain
        if known and not self._plain.count:
            plain = _PLAIN_SHARE * known[0][1]
        points = [(num_requests, plain), *known]
        place = next((place for place, (rows, _) in enumerate(points) if rows >= num_rows), len(points) - 1)
        (start, low), (end, high) = points[max(0, place - 1)], points[place]
        if start == end or num_rows == end:
            return high
        rise = (high - low) / (end - start)
        if num_rows > end:
            return high + max(0.0, rise) * (num_rows - end)  # more rows are never thought to take less
        return low + rise * (num_rows - start)

    def forgive(self, pace: int = 1) -> None:
        """Or else what was slow once would never be tried again. pace: how many times slower than at first."""
        for steady in self._verified.values():
            steady.value *= 1.0 - (1.0 - _FORGIVENESS) / pace


def _surplus(seconds: float, expected: float) -> float:
    return min(max(_LEAST_SURPLUS * expected, seconds - expected), max(_MOST_SURPLUS * expected, _MOST_HOST_SECONDS))


def bounded(seconds: float, expected: float) -> float:
    """What a step took, unless something held it up."""
    return expected + _surplus(seconds, expected)


def _at_least(pairs: Sequence[tuple[int, float]], size: int) -> float | None:
    return next((seconds for known, seconds in pairs if known >= size), None)
