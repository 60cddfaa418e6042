"""Token counts of an answer, in OpenAI's form; drafts count as its "predictions". One per request."""

from __future__ import annotations

from typing import Any

from slipstream.server.catalog import Model
from slipstream.server.generation import Response
from slipstream.server.tools.json_call import Event, Reasoning

COUNTS = ("num_input_tokens", "num_output_tokens", "kv_cache_reused_blocks")
DRAFT_COUNTS = ("total_draft_tokens", "total_accepted_draft_tokens")


def count_outputs(model: Model) -> tuple[str, ...]:
    """The outputs that a Usage reads; none for a model that does not count its tokens."""
    if not {"num_input_tokens", "num_output_tokens"} <= model.outputs:
        return ()
    names = COUNTS + DRAFT_COUNTS if model.has_speculation else COUNTS
    return tuple(name for name in names if name in model.outputs)


class Usage:
    """Token counts of a request; null for a model that does not count its tokens."""

    def __init__(self, model: Model) -> None:
        names = count_outputs(model)
        self._has_counts, self._has_cached = bool(names), "kv_cache_reused_blocks" in names
        self._has_drafts = set(DRAFT_COUNTS) <= set(names)
        self._block_size = model.block_size  # only whole blocks are found in the prefix cache
        self.prompt_tokens = 0
        self._cached_tokens: dict[int, int] = {}
        self.completion_tokens = 0
        self._drafted: dict[int, int] = {}  # by sequence: the engine's counts are cumulative
        self._accepted: dict[int, int] = {}
        self._reasoning_tokens: int | None = None
        self._thinks: dict[int, bool] = {}  # by sequence: whether its last piece was reasoning

    def add(self, response: Response, index: int = 0, is_prompt_new: bool = False) -> None:
        """Count a response of sequence `index`; is_prompt_new: the first of another prompt."""
        if not self._has_counts:
            return
        num_prompt = response.integer("num_input_tokens")
        self.prompt_tokens = self.prompt_tokens + num_prompt if is_prompt_new else max(self.prompt_tokens, num_prompt)
        if self._has_cached and (is_prompt_new or index == 0):  # the other sequences only reuse the first one's prompt
            num_cached = response.integer("kv_cache_reused_blocks") * self._block_size
            self._cached_tokens[index] = min(num_prompt, num_cached)
        self.completion_tokens += sum(response.integers("num_output_tokens"))
        if self._has_drafts:
            self._drafted[index] = response.integer("total_draft_tokens")
            self._accepted[index] = response.integer("total_accepted_draft_tokens")

    def add_reasoning(self, response: Response, index: int, events: list[Event]) -> None:
        """Count a piece of a stream whose text gave these events; one held back belongs to what came before."""
        if not self._has_counts:
            return
        if events:
            self._thinks[index] = isinstance(events[0], Reasoning)
        num_tokens = sum(response.integers("num_output_tokens")) if self._thinks.get(index) else 0
        self._reasoning_tokens = (self._reasoning_tokens or 0) + num_tokens

    def to_json(self) -> dict[str, Any] | None:
        if not self._has_counts:
            return None
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self._has_cached:
            body["prompt_tokens_details"] = {"cached_tokens": sum(self._cached_tokens.values())}
        if self._has_drafts:
            accepted, drafted = sum(self._accepted.values()), sum(self._drafted.values())
            details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
            body["completion_tokens_details"] = details
        if self._reasoning_tokens is not None:
            body.setdefault("completion_tokens_details", {})["reasoning_tokens"] = self._reasoning_tokens
        return body
