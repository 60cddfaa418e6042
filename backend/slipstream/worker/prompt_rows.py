"""Embeddings of a step's tokens that clients have sent. Engine thread. Steps without any do not come here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slipstream.nn.batch import GivenRows
from slipstream.worker.host_copy import to_device
from slipstream.worker.interface import StepInput
from slipstream.worker.request_state import RequestState


def given_rows(
    step: StepInput, states: Sequence[RequestState], device: torch.device, dtype: torch.dtype
) -> GivenRows | None:
    """The tokens of this step whose embeddings are given, or None if it has none."""
    places: list[int] = []
    values: list[torch.Tensor] = []
    first_row = 0
    for state, start, count in zip(states, step.num_computed_tokens, step.num_scheduled_tokens):
        known = state.prompt_rows
        if known is not None:
            found = known.within(start, start + count)
            if found.start < found.stop:
                places += [first_row + position - start for position in known.positions[found]]
                table = np.frombuffer(known.table.data, np.float16).reshape(known.table.shape)
                values.append(torch.from_numpy(table[known.rows[found]]))  # a copy of these rows alone
        first_row += count
    if not places:
        return None
    return GivenRows(to_device(places, torch.int64, device), torch.cat(values).to(device, dtype))
