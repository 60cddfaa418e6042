"""An open loop of requests: they arrive as a Poisson process whether or not earlier ones have ended, and are judged by
what their clients see. Standard library only, so that it runs beside any engine.

Lengths are those of a chat mix, drawn from log-normal distributions: a median of 300 tokens in and 150 out, a tenth of
the prompts above 1,080. The same load is the same for every engine.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from measures import Prompt, Record
from shapes import Shape

INPUT_MEDIAN, INPUT_SIGMA, INPUT_RANGE = 300, 1.0, (16, 4096)
OUTPUT_MEDIAN, OUTPUT_SIGMA, OUTPUT_RANGE = 150, 0.8, (8, 1024)
LONG_INPUT, LONG_OUTPUT = 8192, 64
# A request is good if its first token comes within this, and 99 % of its gaps between responses are no longer than
# that. Tokens that a client gets in one response have no gap.
MAX_TTFT_S, MAX_GAP_S = 0.5, 0.05
# of a load; all of them are in memory before it begins
MIN_REQUESTS, MAX_REQUESTS = 5, 20_000


@dataclass(frozen=True)
class Load:
    """rate: requests a second. shared_prefix: tokens that all prompts begin with. long_rate: of prompts of 8k beside
    them, which are not judged."""

    rate: float
    shared_prefix: int = 0
    long_rate: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Load:
        """rate[:shared prefix[:rate of long prompts]]. Raises ValueError that says what is accepted."""
        fields = text.split(":")
        try:
            rate, prefix, long_rate = [*fields, *["0", "0"][len(fields) - 1 :]]
            load = cls(float(rate), int(prefix), float(long_rate))
        except ValueError:
            raise ValueError(f"{text!r}, accepted: RATE[:SHARED PREFIX[:RATE OF 8K PROMPTS]]") from None
        if not (0 < load.rate < math.inf and load.shared_prefix >= 0 and 0 <= load.long_rate < math.inf):
            raise ValueError(f"{text!r}, accepted: a rate above 0, a prefix and a rate of long prompts of 0 or more")
        return load

    def refusal(self, seconds: float, max_model_len: int) -> str | None:
        """Why the load cannot be measured in so many seconds on such a model; None if it can."""
        num_requests = (self.rate + self.long_rate) * seconds
        if not (self.rate * seconds >= MIN_REQUESTS and num_requests <= MAX_REQUESTS):
            accepted = f"{MIN_REQUESTS} that are judged to {MAX_REQUESTS:,} in all"
            return f"about {num_requests:.0f} requests in {seconds} s, accepted: {accepted}"
        longest = self.shared_prefix + INPUT_RANGE[1] + OUTPUT_RANGE[1]
        longest = max(longest, (LONG_INPUT + LONG_OUTPUT) * (self.long_rate > 0))
        if longest > max_model_len:
            return f"requests of up to {longest:,} tokens, accepted: --max-model-len, {max_model_len:,}"
        return None


@dataclass(frozen=True)
class Arrival:
    at_s: float
    prompt: Prompt
    num_output: int
    is_judged: bool = True


@dataclass
class Timeline:
    """Seconds after the load's beginning. responses: of each, and how many tokens it brought."""

    sent_s: float
    responses: list[tuple[float, int]] = field(default_factory=list)

    def num_tokens(self) -> int:
        return sum(count for _, count in self.responses)

    def ttft_s(self) -> float:
        return self.responses[0][0] - self.sent_s

    def gaps_s(self) -> list[float]:
        """Between responses that follow each other."""
        return [after - before for (before, _), (after, _) in itertools.pairwise(self.responses)]


def draw_arrivals(shape: Shape, load: Load, seconds: float, seed: int = 0) -> list[Arrival]:
    """In order of time."""
    die, top = random.Random(f"{seed} {load}"), min(shape.vocab, 30000)

    def tokens(count: int) -> Prompt:
        return [die.randrange(10, top) for _ in range(count)]

    def length(median: int, sigma: float, limits: tuple[int, int]) -> int:
        return min(max(round(median * math.exp(die.gauss(0, sigma))), limits[0]), limits[1])

    prefix, found = tokens(load.shared_prefix), []
    for at_s in _times(die, load.rate, seconds):
        prompt = prefix + tokens(length(INPUT_MEDIAN, INPUT_SIGMA, INPUT_RANGE))
        found.append(Arrival(at_s, prompt, length(OUTPUT_MEDIAN, OUTPUT_SIGMA, OUTPUT_RANGE)))
    for at_s in _times(die, load.long_rate, seconds):
        found.append(Arrival(at_s, tokens(LONG_INPUT), LONG_OUTPUT, is_judged=False))
    return sorted(found, key=lambda arrival: arrival.at_s)


def _times(die: random.Random, rate: float, seconds: float) -> list[float]:
    times, at_s = [], 0.0
    while rate > 0 and (at_s := at_s + die.expovariate(rate)) < seconds:
        times.append(at_s)
    return times


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank, as `slipstream bench` has it, which vLLM's environment does not hold; 0 of none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else 0.0


def summarise(load: Load, arrivals: Sequence[Arrival], timelines: Sequence[Timeline], seconds: float) -> Record:
    """goodput: good requests a second of the time in which they arrived. Raises RuntimeError if a request got another
    number of tokens than it asked for."""
    judged = []
    for arrival, timeline in zip(arrivals, timelines, strict=True):
        if timeline.num_tokens() != arrival.num_output:
            raise RuntimeError(f"{timeline.num_tokens()} tokens of {arrival.num_output}")
        if arrival.is_judged:
            judged.append(timeline)
    good = [one for one in judged if one.ttft_s() <= MAX_TTFT_S and percentile(one.gaps_s(), 0.99) <= MAX_GAP_S]
    first, gaps = [one.ttft_s() for one in judged], [gap for one in judged for gap in one.gaps_s()]
    last_s = max(one.responses[-1][0] for one in timelines)
    return {
        "what": "open_loop",
        "rate": load.rate,
        "shared_prefix": load.shared_prefix,
        "long_rate": load.long_rate,
        "requests": len(judged),
        "goodput": round(len(good) / seconds, 2),
        "good_share": round(len(good) / len(judged), 3),
        **{f"ttft_p{p}_ms": round(percentile(first, p / 100) * 1e3, 1) for p in (50, 99)},
        **{f"gap_p{p}_ms": round(percentile(gaps, p / 100) * 1e3, 2) for p in (50, 99)},
        "out_tok_s": round(sum(one.num_tokens() for one in timelines) / last_s, 1),
        "end_s": round(last_s, 2),
        "sent_late_ms": round(max(t.sent_s - a.at_s for a, t in zip(arrivals, timelines)) * 1e3, 1),
    }
