"""How many prompt tokens a step may compute beside decodes, whose streams wait for all of them. Engine thread.

A token of a prompt attends to all tokens before it, so chunks of equal length take longer and longer. Here tokens are
weighed by the context that they attend to, so steps take about equally long from a long prompt's beginning to its end.
"""

from __future__ import annotations

import math

from slipstream.core.config import SchedulerConfig

# Chunks of fewer tokens read all weights and keys for a few rows. Of a 32k context 64 rows take longer than 128, which
# get another kernel (docs/measurements/attention.md).
MIN_CHUNK = 128


class PrefillBudget:
    """Prompt tokens that a step with decodes may still take; without decodes there is no limit.

    limit: tokens without a context; None: no limit. attention_parity: cached tokens at which the attention of a token
    costs as much as all its products: there a token counts double.
    """

    def __init__(self, limit: int | None, attention_parity: float) -> None:
        self._limit = math.inf if limit is None else float(limit)
        self._parity = attention_parity
        self._left = math.inf

    @classmethod
    def of(cls, config: SchedulerConfig, attention_parity: float) -> PrefillBudget:
        """Prompts that must not be split have no limit."""
        limit = config.max_mixed_prefill_tokens or config.max_num_batched_tokens
        return cls(limit if config.enable_chunked_prefill else None, attention_parity)

    def begin_step(self, num_decodes: int) -> None:
        self._left = self._limit if num_decodes else math.inf

    def take(self, num_computed: int, num_missing: int, budget: int) -> int:
        """How many of a prompt's missing tokens the step computes; 0 if it is full. budget: tokens left in the step.

        The first prompt of a step gets MIN_CHUNK tokens, or the limit if that is less, in any context.
        """
        weight = 1.0 + num_computed / self._parity
        most = self._left / weight
        if self._left == self._limit:
            most = max(most, min(MIN_CHUNK, self._limit))
        num_new = int(min(num_missing, budget, most))
        self._left = max(0.0, self._left - num_new * weight)
        return num_new
