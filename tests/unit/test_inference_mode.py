"""A worker's calls run in inference mode, whether their thread is in it already or not."""

from __future__ import annotations

import torch
from slipstream.worker.load_target import in_inference_mode


@in_inference_mode
def _made(rows: int) -> torch.Tensor:
    return torch.zeros(rows)


def test_by_itself_and_in_a_thread_that_has_entered_it() -> None:
    assert _made(2).is_inference() and not torch.is_inference_mode_enabled(), "as before behind the call"
    with torch.inference_mode():
        assert _made(rows=3).is_inference() and torch.is_inference_mode_enabled()
