"""What the rows of logits are drawn by.  Plain data."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingMetadata:
    """How each row is sampled: tensors [num_rows], or None (no row uses it).

    temperature: fp32, 0 = greedy (highest logit, lowest id among equals); None = all rows greedy.
    top_k: int32, <= 0 off.  top_p: fp32, >= 1 off.  min_p: fp32, <= 0 off (share of the most likely token's
    probability).  Filters act on the tempered distribution in that order, as in vLLM and Hugging Face; tokens equal to
    the last one kept stay.
    """

    temperature: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None

    @property
    def filters(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        return self.top_k, self.top_p, self.min_p

    def of_rows(self, rows: torch.Tensor) -> SamplingMetadata:
        """The metadata of some rows, by number."""
        columns = (self.temperature, *self.filters)
        return SamplingMetadata(*(None if column is None else column[rows] for column in columns))
