"""Tokens that only the device knows reach a step's own batch, or the tensor where its graph takes them, or both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from slipstream.nn.batch import ForwardBatch
from slipstream.worker.drawn_tokens import DrawnTokens
from slipstream.worker.graph_shapes import GraphShape, PromptShape
from slipstream.worker.input_batch import NO_ROWS, NONE_PENDING, PendingRows, SampledTokens
from slipstream.worker.launched_step import StepTensors

CPU = torch.device("cpu")
PENDING = PendingRows(np.array([0, 2]), np.array([1, 0]), are_first=False, in_order=False)
GIVEN, FILLED, UNTOUCHED, HELD = [5, 5, 5], [91, 5, 90], [0, 0, 0, 0], [90, 91, 0, 0]


@pytest.mark.parametrize(
    ("fields", "own", "held"),
    [
        ({}, FILLED, UNTOUCHED),
        ({"is_last_only": True}, FILLED, UNTOUCHED),
        ({"has_adapters": True}, FILLED, UNTOUCHED),
        ({"graph": GraphShape(4, 1, 4)}, GIVEN, HELD),
        ({"adapter_graph": GraphShape(4, 1, 4), "has_adapters": True}, GIVEN, HELD),
        ({"prompt_graph": PromptShape(128, 32), "is_last_only": True}, GIVEN, HELD),
        ({"prompt_graph": PromptShape(128, 32)}, FILLED, HELD),  # heads read its own batch
    ],
    ids=str,
)
def test_where_tokens_go(fields: dict[str, object], own: list[int], held: list[int]) -> None:
    drawn, batch = DrawnTokens(4, CPU), SimpleNamespace(token_ids=torch.tensor(GIVEN))
    tensors = StepTensors(cast(ForwardBatch, batch), **fields)  # type: ignore[arg-type]
    drawn.give(tensors, NONE_PENDING, None)
    assert batch.token_ids.tolist() == GIVEN and drawn.token_ids.tolist() == UNTOUCHED
    drawn.give(tensors, PENDING, SampledTokens([7, 8], torch.tensor([90, 91]), NO_ROWS))
    assert batch.token_ids.tolist() == own and drawn.token_ids.tolist() == held


def test_what_a_graph_has_drawn_is_there() -> None:
    drawn, batch = DrawnTokens(4, CPU), SimpleNamespace(token_ids=torch.tensor(GIVEN))
    token_ids = drawn.draw(torch.eye(3)[[2, 0]])
    assert token_ids.tolist() == [2, 0] and drawn.token_ids.tolist() == [2, 0, 0, 0]
    drawn.token_ids[3] = 17
    tensors = StepTensors(cast(ForwardBatch, batch), GraphShape(4, 1, 4))
    drawn.give(tensors, PENDING, SampledTokens([7, 8], token_ids, NO_ROWS))
    assert drawn.token_ids.tolist() == [2, 0, 0, 17] and batch.token_ids.tolist() == GIVEN
