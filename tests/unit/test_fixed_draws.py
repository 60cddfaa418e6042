"""What tests draw is the same in every run, in any order and on any worker (tests/conftest.py)."""

from __future__ import annotations

import random
import sys
import types
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def drawn_by_a_fixture() -> float:
    return random.random()


def test_a_test_draws_by_its_own_name(request: pytest.FixtureRequest) -> None:
    seed = zlib.crc32(request.node.nodeid.encode())
    assert random.random() == random.Random(seed).random()
    assert np.random.random() == np.random.RandomState(seed).random_sample()
    assert torch.initial_seed() == seed


def test_a_fixture_draws_by_its_own_name(request: pytest.FixtureRequest, drawn_by_a_fixture: float) -> None:
    name = f"{request.node.nodeid.partition('::')[0]}::drawn_by_a_fixture[0]"
    assert drawn_by_a_fixture == random.Random(zlib.crc32(name.encode())).random()


def examples() -> list[tuple[int, str]]:
    seen: list[tuple[int, str]] = []

    @given(st.integers(), st.text())
    def take(number: int, text: str) -> None:
        seen.append((number, text))

    take()
    return seen


@pytest.mark.skipif(not settings.default.derandomize, reason="another profile was asked for")
def test_examples_are_those_of_the_run_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Even when source with new constants has been imported since."""
    first = examples()
    source = tmp_path / "elsewhere.py"
    source.write_text("NUMBERS = " + repr(list(range(70_001, 71_001))))
    module = types.ModuleType("elsewhere")
    module.__file__ = str(source)
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    assert len(first) == 100 and examples() == first
