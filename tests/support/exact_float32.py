"""float32 products of cuBLAS in full precision, for tests that compare texts of float32 models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_float32() -> Iterator[None]:
    """TF32 is off inside and as before afterwards.

    Not by monkeypatch: the switch is computed by torch.backends.cuda.matmul and is in no `__dict__`, so what pytest
    does to undo is to delete it, which that object refuses.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
