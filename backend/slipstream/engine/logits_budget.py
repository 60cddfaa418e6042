"""How many bytes of logits the running requests may hold together, so that they cannot fill the host's memory.

Any thread. A request takes its worst case before it is submitted, and gives it back once it is answered.
"""

from __future__ import annotations

from slipstream.core.byte_budget import ByteBudget
from slipstream.core.errors import CapacityError, RequestError
from slipstream.core.request import Request

_FIELDS = ("return_context_logits", "return_generation_logits")


class LogitsBudget(ByteBudget):
    """limit: 0 if no logits are sent. vocab_size: the width of the logits."""

    def __init__(self, limit: int, vocab_size: int, max_model_len: int) -> None:
        super().__init__(limit)
        self._vocab_size, self._max_model_len = vocab_size, max_model_len

    def take(self, request: Request) -> None:
        """Raises RequestError for more than there is, CapacityError for more than is left."""
        params, num_prompt = request.params, request.num_prompt_tokens
        field = next((name for name in _FIELDS if getattr(params, name)), None)
        if field is None:
            return
        if not self._limit:
            raise RequestError(field, "got True, accepted: False, because max_logits_bytes=0, a parameter of the model")
        num_new = max(0, min(params.max_tokens, self._max_model_len - num_prompt))
        num_rows = num_prompt * params.return_context_logits + params.n * num_new * params.return_generation_logits
        num_bytes = 4 * self._vocab_size * num_rows
        told = f"{num_rows} tokens x {self._vocab_size} x 4 = {num_bytes} bytes of logits"
        if num_bytes > self._limit:
            raise RequestError(field, f"{told}, accepted: at most max_logits_bytes={self._limit}")
        if (others := self._hold(request.handle, num_bytes)) is not None:
            beside = f"beside {others.num_bytes} of running requests"
            raise CapacityError(f"{told} {beside}; max_logits_bytes={self._limit}")
