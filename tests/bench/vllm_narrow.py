"""Imported by vLLM's engine process (worker_extension_cls): a model that only ever says a few hundred tokens."""

from __future__ import annotations

from typing import Any


class Narrow:
    """Becomes part of vLLM's worker."""

    model_runner: Any

    def narrow(self, num_tokens: int) -> None:
        """Logits of all but the first tokens become zero; of these some hundred, the largest is above."""
        self.model_runner.get_model().lm_head.weight.data[num_tokens:] = 0
