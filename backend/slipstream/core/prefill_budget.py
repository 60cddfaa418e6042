"""How many prompt tokens a step may compute beside decodes, whose streams wait for all of them. Engine thread.

A token of a prompt attends to all tokens before it, so chunks of equal length take longer and longer. Here tokens are
weighed by the context that they attend to, so steps take about equally long from a long prompt's beginning to its end.
What such a token takes is measured, so steps can be bounded by time as well.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from slipstream.core.config import SchedulerConfig
from slipstream.core.layered_prefill import LayeredPrefill
from slipstream.core.request import Request
from slipstream.core.step import ScheduledStep

# Chunks of fewer tokens read all weights and keys for a few rows. Behind a context of 32k, 64 rows take longer than
# 128, which another kernel computes (docs/measurements/attention.md).
MIN_CHUNK = 128
# Without a setting: what a step with decodes and prompts takes, and at least so many times a step of decodes alone, so
# that prompts get two thirds of the time however many requests decode.
AUTO_STEP_SECONDS = 0.025
AUTO_RATIO = 3.0
# Steps are longer where many prompts wait, whose time to the first token then depends on how many tokens a second are
# computed, but short enough for streams that want a token every 50 ms (docs/measurements/serving.md).
PROMPTS_OF_A_STEP, MOST_STEPS = 8, 1.75
_NUM_STEPS = 15  # with prompts, that count: a few that compile or wait for the host change nothing
_ENOUGH = 2 / 3  # of them agree that no more tokens fit
_NUM_QUIET = 5
# After so many steps with decodes and prompts one has decodes alone: how long these take changes with their contexts.
_MOST_MIXED = 64
# Likewise, where hardly any token seems to fit: perhaps decodes alone take longer than when they were measured last.
_MOST_MIXED_OF_FULL = 8
# Or when there are fewer decodes than this share of those that were measured.
_FEWER = 3 / 4
# Chunks are cut by layers where a token's weight is at least this: without a context MIN_CHUNK tokens are cheap.
_DEAR = 1.25
_LEAST_SHARE = 1 / 8


def may_be_layered(max_model_len: int, attention_parity: float) -> bool:
    """Whether some context is so long that chunks are cut by layers behind it."""
    return _weight(max_model_len, attention_parity) >= _DEAR


def _weight(num_computed: int, attention_parity: float) -> float:
    """The weight of a token behind so many."""
    return 1.0 + num_computed / attention_parity


class _MixedStep(NamedTuple):
    """weight: of its prompts' tokens. quiet_s: what decodes were a part of its seconds. is_layered: they went through
    layers by themselves, in addition to the decodes."""

    weight: float
    seconds: float
    quiet_s: float
    is_layered: bool


class StepPace:
    """How many weighed tokens of prompts make a step with decodes as long as it may be, by the last steps' times.

    A step's time grows slowly while its few rows wait for the weights, then with every token. So a measured step says
    only what surely fits: if it took less than it may, more tokens in proportion to its whole time; if it took longer,
    fewer in proportion to what they added. What most steps say less than is taken. Layers that a chunk goes through by
    itself add up, so more of them fit in proportion to what they added.

    max_step_s, max_ratio: of a step, and of it over a quiet one; 0: no such bound. Without both AUTO_STEP_SECONDS,
    longer by one for every PROMPTS_OF_A_STEP prompts that wait, up to MOST_STEPS of them; or AUTO_RATIO quiet steps, if
    that is more.
    """

    def __init__(self, max_step_s: float = 0.0, max_ratio: float = 0.0) -> None:
        self._max_step_s, self._max_ratio = max_step_s or math.inf, max_ratio or math.inf
        self._quiet: deque[float] = deque(maxlen=_NUM_QUIET)  # seconds of steps without prompts
        self._quiet_s = 0.0  # their median
        self._steps: deque[_MixedStep] = deque(maxlen=_NUM_STEPS)
        self._num_mixed = 0  # steps with decodes and prompts since one of decodes alone

    @property
    def least_share(self) -> float:
        """The part of a chunk cut by layers that a step takes in any case: nothing if somebody has set its time."""
        return _LEAST_SHARE if self._max_step_s == self._max_ratio == math.inf else 0.0

    def is_quiet_due(self, most_tokens: float) -> bool:
        """Whether the next step should have decodes alone, to be measured; asks for one, not for several in a row.

        most_tokens: that fit otherwise."""
        is_due = self._num_mixed >= (_MOST_MIXED if most_tokens >= MIN_CHUNK else _MOST_MIXED_OF_FULL)
        if is_due:
            self._num_mixed = 0
        return is_due

    def forget_quiet(self) -> None:
        """There are fewer decodes than when their steps were measured: the next step is one of them alone."""
        self._quiet.clear()
        self._num_mixed = _MOST_MIXED

    def most_tokens(self, num_waiting: int) -> float:
        """Without a context; inf until a step with a prompt was measured."""
        if not self._steps:
            return math.inf
        target = self._most_seconds(num_waiting)
        fitting = sorted(self._fitting(target, step) for step in self._steps)
        return fitting[math.ceil(_ENOUGH * len(fitting)) - 1]

    def _most_seconds(self, num_waiting: int) -> float:
        """That a step may take."""
        bound = min(self._max_step_s, self._max_ratio * (self._quiet_s or math.inf))
        if bound < math.inf:
            return bound
        backlog = min(max(num_waiting / PROMPTS_OF_A_STEP, 1.0), MOST_STEPS)
        return max(AUTO_STEP_SECONDS * backlog, AUTO_RATIO * self._quiet_s)

    def _fitting(self, target: float, step: _MixedStep) -> float:
        """Tokens that fit beside today's decodes, as one step shows it."""
        added = max(step.seconds - step.quiet_s, 0.01 * step.seconds, 1e-9)
        room = max(target - self._quiet_s, 0.0)
        if added + self._quiet_s >= target or step.is_layered or not step.quiet_s:
            return step.weight * room / added
        return step.weight * target / (added + self._quiet_s)

    def note(self, weight: float, has_decodes: bool, seconds: float, is_layered: bool = False) -> None:
        """Record a step. weight: of its prompts' tokens, as PrefillBudget weighs them. is_layered: of some layers of a
        chunk, which are few but no short chunk."""
        if not weight:
            self._quiet.append(seconds)
            self._quiet_s = median(self._quiet)
            self._num_mixed = 0
            return
        self._num_mixed += has_decodes
        # Fewer take as long as their launches, and say too little of more: they count until more have been measured.
        is_enough = is_layered or weight >= MIN_CHUNK
        if is_enough or weight > max((known.weight for known in self._steps), default=0.0):
            self._steps.append(_MixedStep(weight, seconds, self._quiet_s if has_decodes else 0.0, is_layered))


class PrefillBudget:
    """Prompt tokens that a step with decodes may still take; without decodes there is no limit.

    limit: tokens without a context; None: no limit. attention_parity: cached tokens at which the attention of a token
    costs as much as all its products: there a token counts double. pace: bounds them by time as well. layered: for
    chunks of which only some layers fit.
    """

    def __init__(
        self,
        limit: int | None,
        attention_parity: float = math.inf,
        pace: StepPace | None = None,
        clock: Callable[[], float] = time.monotonic,
        layered: LayeredPrefill | None = None,
    ) -> None:
        self._limit = math.inf if limit is None else float(limit)
        self._parity = attention_parity
        self._pace = pace if limit is not None else None
        self._clock = clock
        self._layered = LayeredPrefill() if layered is None else layered
        self._step = ScheduledStep()
        self._full = self._left = self._for_layers = math.inf
        self._last_noted = 0.0
        self._num_quiet_decodes = 0  # of the last step without prompts
        self._device_tells = False
        self._unread_weight, self._unread_since = 0.0, math.inf  # of steps that no result has waited for

    @classmethod
    def of(
        cls,
        config: SchedulerConfig,
        attention_parity: float = math.inf,
        is_paced: bool = False,
        layered: LayeredPrefill | None = None,
    ) -> PrefillBudget:
        """Prompts that must not be split have no limit. is_paced: whether time is a limit without a setting, too."""
        limit = config.max_mixed_prefill_tokens or config.max_num_batched_tokens
        bounds = config.max_mixed_step_ms * 1e-3, config.max_mixed_step_ratio
        pace = StepPace(*bounds) if is_paced or any(bounds) else None
        return cls(limit if config.enable_chunked_prefill else None, attention_parity, pace, layered=layered)

    def begin_step(self, step: ScheduledStep, num_waiting: int = 0) -> None:
        """step: with its decodes. num_waiting: prompts of which nothing is computed yet."""
        self._step, step.num_decodes = step, len(step.requests)
        step.scheduled_at = self._clock()
        self._full = self._for_layers = self._limit if step.num_decodes else math.inf
        if self._pace is not None and step.num_decodes:
            if step.num_decodes < _FEWER * self._num_quiet_decodes:
                self._num_quiet_decodes = step.num_decodes
                self._pace.forget_quiet()
            most = self._pace.most_tokens(num_waiting)
            is_quiet = self._pace.is_quiet_due(most)
            self._full = 0.0 if is_quiet else min(self._limit, max(MIN_CHUNK, most))
            self._for_layers = min(self._limit, most)
        self._left = self._full

    def take(self, num_computed: int, num_missing: int, budget: int) -> int:
        """How many of a prompt's missing tokens the step computes; 0 if it is full. budget: tokens left in the step.

        The first prompt of a step gets MIN_CHUNK tokens, or the limit if that is less, in any context: where so many do
        not fit, `take_layers` comes first.
        """
        if not self._full:
            return 0
        weight = _weight(num_computed, self._parity)
        most = self._left / weight
        if self._left == self._full:
            most = max(most, min(MIN_CHUNK, self._limit))
        num_new = int(min(num_missing, budget, most))
        if self._full < math.inf and 0 < num_missing - num_new < MIN_CHUNK <= num_new:
            # The rest is a chunk that is not short: behind a long context a short one takes longer than this one.
            num_new = max(num_missing - MIN_CHUNK, num_missing // 2)
        self._left = max(0.0, self._left - num_new * weight)
        self._step.prefill_weight += num_new * weight
        return num_new

    def take_first(self, request: Request, num_computed: int, num_missing: int, budget: int) -> int:
        """`take` for a prompt that begins behind num_computed cached tokens.

        Where a bound is set that a whole chunk would pass, one token begins, and layers of chunks follow."""
        if self._pace is not None and not self._pace.least_share:
            first = min(MIN_CHUNK, self._limit, num_missing, budget)
            is_dear = self._is_dear(_weight(num_computed, self._parity), first)
            if is_dear and self._layered.takes(request, num_missing):
                budget = min(budget, 1)
        return self.take(num_computed, num_missing, budget)

    def take_layers(self, request: Request, num_missing: int, budget: int) -> bool:
        """Give the step some layers of a prompt's shortest chunk if the whole chunk does not fit.

        True: the step takes no more of prompts. Behind another prompt's tokens a chunk that is underway waits."""
        weight, is_first = _weight(request.num_computed_tokens, self._parity), self._left == self._full
        is_underway = self._layered.underway(request) is not None
        num_tokens = int(min(MIN_CHUNK, self._limit, budget))
        if budget <= 0 or not 0 < self._full < math.inf or not (is_first or is_underway):
            return False
        is_dear = self._is_dear(weight, num_tokens)
        if not is_underway and not (is_dear and self._layered.takes(request, num_missing)):
            return False
        if is_first:
            least_share = 0.0 if self._pace is None else self._pace.least_share
            most = max(self._for_layers, num_tokens * weight * least_share)
            length = self._layered.length_of(num_tokens, num_missing)
            chunk = self._layered.next(request, length, weight, most)
            self._step.layered = chunk
            self._step.prefill_weight += chunk.num_tokens * weight * self._layered.share_of(chunk)
        self._left = 0.0
        return True

    def _is_dear(self, weight: float, num_tokens: float) -> bool:
        """Whether a chunk of tokens of this weight is to be cut by layers: it does not fit as a whole."""
        return weight >= _DEAR and self._for_layers < num_tokens * weight

    def note_done(self, step: ScheduledStep) -> None:
        """Measure a step whose result has come: since it was scheduled or, if later, the one before it was done.

        The device knows better: while the host launches the next step, it does not see that this one is done. Nor does
        it wait for a step that samples nothing, which is measured with the next one."""
        now = self._clock()
        if self._pace is not None and step.requests:
            self._device_tells |= step.device_s is not None
            weight = self._unread_weight + step.prefill_weight
            since = min(self._unread_since, step.scheduled_at)
            self._unread_weight, self._unread_since = 0.0, math.inf
            seconds = now - max(self._last_noted, step.scheduled_at)
            if step.device_s is not None:
                seconds = min(step.device_s, now - since)  # not what the device had nothing to do
            if self._device_tells and not any(step.samples):
                self._unread_weight, self._unread_since = weight, since
            else:
                self._pace.note(weight, step.num_decodes > 0, seconds, step.layered is not None)
                if not weight:
                    self._num_quiet_decodes = step.num_decodes
        self._last_noted = now
        if step is self._step:
            self._step = ScheduledStep()  # what its requests hold, such as adapters, is free when they have ended
