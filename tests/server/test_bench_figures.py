"""The arithmetic of `slipstream bench` and of the load test that clients have, without a server."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import queue
import random
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from slipstream.commands import bench


@pytest.mark.parametrize("count", [1, 2, 3, 8, 100, 101, 200])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99, 1.0])
def test_percentiles_are_nearest_ranks(count: int, share: float) -> None:
    values = [float(value) for value in range(count, 0, -1)]
    expected = np.percentile(values, 100 * share, method="inverted_cdf")
    assert bench.percentile(values, share) == expected
    assert bench.percentile([], share) == 0.0


def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is a second later at each look."""
    clock = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))


def test_a_response_without_a_token_is_no_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(*_):
        for count in (0, 1, 0, 2, 1, 0):
            yield SimpleNamespace(integer=lambda _, count=count: count)

    monkeypatch.setattr(bench, "generate", generate)
    ticking(monkeypatch)
    values = {"model": "llm", "input_tokens": 1, "output_tokens": 4, "temperature": 0.0, "num_draft_tokens": None}
    figures = bench.Figures()
    asyncio.run(bench.one_request(None, argparse.Namespace(**values), random.Random(0), figures))
    assert (figures.ttft, figures.tpot, figures.num_tokens, figures.errors) == ([1.0], [2 / 3], 4, [])


@pytest.fixture(scope="module")
def load_test(root: Path) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(root / "client_examples/load_test.py")))


def test_the_load_test_counts_responses_that_bring_tokens(load_test: SimpleNamespace) -> None:
    def result(count: int, is_final: bool) -> SimpleNamespace:
        response = SimpleNamespace(parameters={"triton_final_response": SimpleNamespace(bool_param=is_final)})
        return SimpleNamespace(get_response=lambda: response, as_numpy=lambda _: np.array([count]))

    answers: queue.SimpleQueue = queue.SimpleQueue()
    for at_s, count in ((1e9, 0), (1e9 + 1, 1), (1e9 + 2, 0), (1e9 + 3, 2)):
        answers.put((at_s, result(count, at_s == 1e9 + 3), None))
    figures = load_test.Figures()
    client = SimpleNamespace(async_stream_infer=lambda *_, **__: None)
    arguments = argparse.Namespace(max_tokens=3, model="llm")
    assert load_test.run_request(client, answers, arguments, 0, figures)
    assert figures.itl_s == [2.0] and figures.num_tokens == 3 and figures.ttft_s[0] > 1e8


@pytest.mark.parametrize("option", ["--streams", "--requests", "--max-tokens"])
def test_the_load_test_refuses_a_load_of_nothing(
    load_test: SimpleNamespace, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["load_test.py", option, "0"])
    with pytest.raises(SystemExit):
        load_test.main()
    assert f"{option}: 0, accepted: 1 or more" in capsys.readouterr().err
