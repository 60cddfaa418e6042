"""Fixtures shared by all tests, and the settings that must be made before torch and Triton-lang are imported."""

from __future__ import annotations

import functools
import gc
import os
import random
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fixed_examples import register_profiles

if TYPE_CHECKING:
    from llm_server import LlmServer

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if shutil.which("nvidia-smi") is None:
    # Read when triton is first imported, by whichever test comes first: without a GPU, kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

gc.disable()  # until tests are collected: it would look again and again through what is imported, and stays
register_profiles()
ROOT = Path(__file__).resolve().parent.parent
SAMPLED = ("kernels", "models", "engine")  # folders whose tests have large grids of cases
SHARE = 8  # one case of that many
# Files in the order in which `make test` begins them, those that take longest first: what is begun last ends alone.
LONGEST = (ROOT / "tests/longest_files.txt").read_text().split()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-server", action="store_true", help="fail, not skip, without tritonserver (`make test`)")
    parser.addoption("--sample-cases", action="store_true", help="fewer cases of large grids (`make test`)")
    parser.addoption("--longest-first", action="store_true", help="begin with tests/longest_files.txt")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All grids together take longer than a change may wait. Which cases are drawn by name, so they are always the
    same; the suite of a GPU and pytest by itself run all of them."""
    if config.getoption("--longest-first"):
        place = {ROOT / name: number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(item.path, len(place)))
    if not config.getoption("--sample-cases"):
        return
    grids: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.path.relative_to(ROOT).parts[1] in SAMPLED and isinstance(item, pytest.Function) and "[" in item.name:
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    seen: set[tuple[Path, str, str]] = set()
    left_out: set[pytest.Item] = set()
    for cases in grids.values():
        if len(cases) > 2:
            left_out |= set(cases) - sampled(cases, seen)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported until now is not looked at by each collection of garbage: a third of the engine tests' time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(hookwrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    yield
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()  # or libraries report what is left at the end


def sampled(cases: list[pytest.Function], seen: set[tuple[Path, str, str]]) -> set[pytest.Function]:
    """An eighth of the cases of a grid, or more until the file has had each value of its parameters; first those with
    most values that it has not had."""
    left = sorted(cases, key=lambda case: zlib.crc32(case.nodeid.encode()))
    taken: set[pytest.Function] = set()

    def values(case: pytest.Function) -> set[tuple[Path, str, str]]:
        return {(case.path, name, repr(value)) for name, value in case.callspec.params.items()}

    while left:
        case = max(left, key=lambda case: len(values(case) - seen))
        if len(taken) * SHARE >= len(cases) and not values(case) - seen:
            break
        left.remove(case)
        taken.add(case)
        seen |= values(case)
    return taken


def pytest_sessionstart(session: pytest.Session) -> None:
    """Without this, a broken setup would skip every test of the server, and `make test` would pass."""
    if not session.config.getoption("--require-server"):
        return
    from llm_server import missing_server

    if missing_server():
        raise pytest.UsageError(missing_server())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How a test failed that passed when it ran again (Makefile): -rR prints its name alone."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.write_sep("_", f"first run of {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)


def draw_the_same(name: str) -> None:
    """Start the global generators anew, by a name: what is drawn depends on no test before, nor on a worker's share."""
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        # manual_seed notes, with its stack, what it would do to a GPU if there were one: 2 % of the time of all tests
        (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    draw_the_same(f"{fixturedef.baseid}::{fixturedef.argname}[{request.param_index}]")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    draw_the_same(item.nodeid)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def demo_model(root: Path) -> Path:
    """The checkpoint that ships with the repository."""
    path = root / "models" / "slipstream-demo-code"
    if not (path / "model.safetensors").exists():
        pytest.skip(f"{path} is not there: the demo checkpoint is part of the repository")
    return path


@pytest.fixture(scope="session")
def llm_server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmServer]:
    """The real server with the project's model repository, one for the whole session: a start costs seconds."""
    from llm_server import LlmServer, missing_server

    if missing_server():
        pytest.skip(missing_server())
    with LlmServer(tmp_path_factory.mktemp("llm-server"), demo_model) as server:
        yield server


@pytest.fixture(scope="session")
def greedy(demo_model: Path) -> Callable[..., str]:
    """greedy(prompt, max_tokens): what the engine in this process makes of a prompt, which every way in must equal."""
    from slipstream import LLM
    from slipstream.core.sampling_params import SamplingParams

    llm = LLM(str(demo_model))

    @functools.cache
    def complete(prompt: str, max_tokens: int = 24) -> str:
        return llm.generate(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))[0].text

    return complete
