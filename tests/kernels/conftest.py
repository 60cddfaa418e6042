"""Where kernel tests run: compiled on CUDA if there is a GPU, else in Triton-lang's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch
from hopper import hopper_device
from interpreted_rows import sum_rows_alike


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """A device on which triton kernels run in this process: interpreted on the CPU or compiled for CUDA, never both."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        return torch.device("cuda")
    if torch.cuda.is_available():
        pytest.skip("a GPU is present: kernels are compiled in this process, not interpreted")
    return torch.device("cpu")


@pytest.fixture(scope="session")
def hopper() -> torch.device:
    """The GPU, of the tests that ask for it; skips where there is none."""
    return hopper_device()


@pytest.fixture
def products_of_equal_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sum_rows_alike(monkeypatch)
