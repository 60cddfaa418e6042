"""Outputs in columns are the objects that they stand for."""

from __future__ import annotations

from slipstream.core.outputs import DecodedTokens, StepOutput, StepOutputs
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import SamplingParams


def _requests(count: int) -> list[Request]:
    return [Request([number], SamplingParams()) for number in range(count)]


def test_columns_become_objects_once_and_in_order() -> None:
    first, second, third, other = _requests(4)
    of_run = StepOutputs([DecodedTokens([first, second, third], [[1], [2], [3]], ended={1: FinishReason.STOP})])
    outputs = StepOutputs()
    assert not outputs and of_run
    outputs.append(StepOutput(other, [9], FinishReason.CANCELLED))
    outputs += of_run
    outputs += [StepOutput(other, [])]
    assert outputs.ended() == [other, second]
    next(iter(of_run)).error = "seen by those who look later, wherever the columns are"
    found = [(output.request, output.new_token_ids, output.finish_reason, bool(output.error)) for output in outputs]
    assert found == [
        (other, [9], FinishReason.CANCELLED, False),
        (first, [1], None, True),
        (second, [2], FinishReason.STOP, False),
        (third, [3], None, False),
        (other, [], None, False),
    ]
