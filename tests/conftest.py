"""Fixtures shared by all tests, and the settings that must be made before torch and Triton-lang are imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parent.parent


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
