"""Checks of long texts by `guarded`: in parts, so that no request's prompt costs another its check."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from fake_models import FakeModels
from guarded_model import Open, ask
from hypothesis import given
from hypothesis import strategies as st
from patience import wait_until
from slipstream.encoders.check_calls import MAX_CHECK_CHARS, in_calls


class SlowModels(FakeModels):
    """The safety model takes a millisecond for 100 characters, one call after the other."""

    turn = threading.Lock()

    def ModelInfer(self, request: Any, context: Any) -> Any:
        if request.model_name == "safety":
            with self.turn:
                time.sleep(len(request.raw_input_contents[-1]) / 1e5)
        return super().ModelInfer(request, context)


def test_a_prompt_that_takes_long_is_checked_and_costs_nobody_a_check(guard: Open) -> None:
    """In one call it took longer than encoder_timeout_ms: it failed, and with it the checks of all others."""
    models = SlowModels(lambda models, context: iter(["fine"]))
    model = guard(models, encoder_timeout_ms="1500")
    long = [ask(model, "x" * 199_000) for _ in range(2)]
    wait_until(lambda: models.checked, "the first of them to be checked")
    assert ask(model, "short").wait().text == "fine"
    assert not any(sender.has_ended.is_set() for sender in long)
    assert [sender.wait().text for sender in long] == ["fine"] * 2
    assert max(map(len, models.checked)) <= 8000


@pytest.mark.parametrize("place", [0, 6_998, 7_999, 14_990, 50_000, 199_990])
def test_what_is_unsafe_is_found_wherever_it_stands(guard: Open, place: int) -> None:
    models = FakeModels(lambda models, context: iter(["fine"]))
    prompt = "x" * place + " BAD " + "x" * (199_990 - place)
    last = ask(guard(models), prompt).wait().sent[-1].outputs
    assert bytes(last["block_reason"][0]) == b"prompt" and last["block_categories"].tolist() == [b"violence"]


@given(lengths=st.lists(st.integers(0, 30_000), max_size=40))
def test_calls_have_every_part_of_every_text(lengths: list[int]) -> None:
    texts = ["".join(map(chr, range(1000 * number, 1000 * number + 100))) * 300 for number in range(1, 41)]
    texts = [text[:length] for text, length in zip(texts, lengths)]
    calls = list(in_calls(texts))
    assert all(sum(map(len, rows)) <= MAX_CHECK_CHARS and 0 < len(rows) <= 32 for rows in calls)
    rows = [row for call in calls for row in call]
    for text in texts:
        for start in range(0, max(1, len(text) - 999), 500):
            assert any(text[start : start + 1000] in row for row in rows)
