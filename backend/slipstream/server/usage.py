"""Token counts of an answer, in OpenAI's form; drafts count as its "predictions". One per request."""

from __future__ import annotations

from typing import Any

from slipstream.server.generation import Response

COUNTS = ("num_input_tokens", "num_output_tokens", "kv_cache_reused_blocks")
DRAFT_COUNTS = ("total_draft_tokens", "total_accepted_draft_tokens")


class Usage:
    """block_size: tokens of a KV block, of which only whole ones are found in the prefix cache."""

    def __init__(self, has_drafts: bool, block_size: int) -> None:
        self._has_drafts, self._block_size = has_drafts, block_size
        self.prompt_tokens = 0
        self._cached_tokens: dict[int, int] = {}
        self.completion_tokens = 0
        self._drafted: dict[int, int] = {}  # by sequence: the engine's counts are totals
        self._accepted: dict[int, int] = {}

    def add(self, response: Response, index: int = 0, is_prompt_new: bool = False) -> None:
        """Count a response of sequence `index`; is_prompt_new: of a further prompt."""
        num_prompt = response.integer("num_input_tokens")
        self.prompt_tokens = self.prompt_tokens + num_prompt if is_prompt_new else max(self.prompt_tokens, num_prompt)
        if is_prompt_new or index == 0:  # what its siblings find is the first sequence's
            num_cached = response.integer("kv_cache_reused_blocks") * self._block_size
            self._cached_tokens[index] = min(num_prompt, num_cached)
        self.completion_tokens += sum(response.integers("num_output_tokens"))
        if self._has_drafts:
            self._drafted[index] = response.integer("total_draft_tokens")
            self._accepted[index] = response.integer("total_accepted_draft_tokens")

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens.values())},
        }
        if self._has_drafts:
            accepted, drafted = sum(self._accepted.values()), sum(self._drafted.values())
            details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
            body["completion_tokens_details"] = details
        return body
