"""The tiny checkpoint that the engine tests share, one roomy engine on it, and a server behind a socket."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from engine_driver import make_engine
from engine_peer import Backend, InThread
from exact_float32 import exact_float32
from forked_processes import Forks
from slipstream.engine import grammar_link, rank_processes, server
from slipstream.engine.engine import Engine
from tiny_model import make_tiny_llama


@pytest.fixture(scope="session", autouse=True)
def forked_processes() -> Iterator[None]:
    """Ranks and grammar processes of this process's engines are forked, not started: half of what their tests took was
    `import torch`."""
    if torch.cuda.is_available():  # which a forked process cannot use
        yield
        return
    with closing(Forks()) as forks, pytest.MonkeyPatch.context() as patches:
        for module in (rank_processes, grammar_link):
            patches.setattr(module, "start_process", forks.start)
        yield


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Engine:
    return make_engine(tiny_llama)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Twelve prompts of 1 to 90 random tokens; special tokens are left out."""
    dice = random.Random(7)
    lengths = [1, 2, 7, 8, 9, 16, 17, 31, 40, 64, 65, 90]
    return [[dice.randrange(3, 420) for _ in range(length)] for length in lengths]


@pytest.fixture
def no_tf32() -> Iterator[None]:
    with exact_float32():
        yield


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    monkeypatch.setattr(server, "freeze", list)  # a server in this process is not all that there is
    one = Backend(tmp_path)
    yield one
    one.close()


@pytest.fixture
def null_server(backend: Backend, demo_model: Path) -> InThread:
    return InThread(backend, demo_model)
