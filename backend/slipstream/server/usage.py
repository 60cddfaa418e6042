"""Token counts of an answer, in OpenAI's form; drafts count as its "predictions". One per request."""

from __future__ import annotations

from typing import Any

from slipstream.server.generation import Response

COUNTS = ("num_input_tokens", "num_output_tokens")
DRAFT_COUNTS = ("total_draft_tokens", "total_accepted_draft_tokens")


class Usage:
    def __init__(self, has_drafts: bool) -> None:
        self._has_drafts = has_drafts
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._drafted: dict[int, int] = {}  # by sequence: the engine's counts are totals
        self._accepted: dict[int, int] = {}

    def add(self, response: Response, index: int = 0, is_prompt_new: bool = False) -> None:
        """Count a response of sequence `index`; is_prompt_new: of a further prompt."""
        num_prompt = response.integer("num_input_tokens")
        self.prompt_tokens = self.prompt_tokens + num_prompt if is_prompt_new else max(self.prompt_tokens, num_prompt)
        self.completion_tokens += sum(response.integers("num_output_tokens"))
        if self._has_drafts:
            self._drafted[index] = response.integer("total_draft_tokens")
            self._accepted[index] = response.integer("total_accepted_draft_tokens")

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self._has_drafts:
            accepted, drafted = sum(self._accepted.values()), sum(self._drafted.values())
            details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
            body["completion_tokens_details"] = details
        return body
