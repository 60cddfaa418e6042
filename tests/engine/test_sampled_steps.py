"""No logits are copied to fp32 but those of rows that somebody edits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.step_inputs import new_request
from slipstream.worker.request_state import RequestState
from slipstream.worker.sample.sampler import Sampler
from slipstream.worker.sample.structured_output import GrammarMasks
from slipstream_kernels import ops

CPU = torch.device("cpu")


def test_only_what_is_edited_is_copied_to_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the dtypes and rows of what is drawn; a mask reaches its row among the edited ones."""
    kinds = (
        {"temperature": 0.8}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.9, "logit_bias": ((3, 5.0),)},
        {"temperature": 0.0}, {"temperature": 1.0, "logprobs": 1}, {"temperature": 0.0},
    )  # fmt: skip
    states = [
        RequestState(replace(new_request(Request([1] * 5, SamplingParams(**kind), seed=i)), has_grammar=i == 5))  # type: ignore[arg-type]
        for i, kind in enumerate(kinds)
    ]
    logits, positions = torch.randn(6, 64, generator=torch.Generator().manual_seed(3)).bfloat16(), torch.arange(6)
    seen: list[tuple[int, torch.dtype]] = []
    for name in ("sample", "greedy"):
        original = getattr(ops, name)

        def noted(logits: torch.Tensor, *arguments: object, original=original) -> torch.Tensor:  # type: ignore[no-untyped-def]
            seen.append((len(logits), logits.dtype))
            return original(logits, *arguments)

        monkeypatch.setattr(ops, name, noted)
    sampler = Sampler(64, 6, 64, CPU)

    def drawn(rows: list[int], **others: object) -> list[int]:
        seen.clear()
        own = [states[row] for row in rows]
        return sampler.sample(own, logits[rows].clone(), positions[rows], **others).result().token_ids  # type: ignore[arg-type]

    plain = drawn([0, 1, 3, 4])
    assert seen == [(4, torch.bfloat16)]
    bits = torch.tensor([[1 << 7, 0]], dtype=torch.int32).numpy()
    mixed = drawn([0, 1, 2, 3, 4, 5], masks=GrammarMasks([5], bits))
    assert seen == [(6, torch.bfloat16), (2, torch.float32)]
    assert [mixed[row] for row in (0, 1, 3, 4)] == plain and mixed[5] == 7
    assert mixed[2] == drawn([2])[0] and seen == [(1, torch.float32)]
    assert drawn(list(range(6)), masks=GrammarMasks([5], bits), drawn=torch.tensor(mixed)) == mixed
    assert seen == [(2, torch.float32)], "the graph has drawn the others"
