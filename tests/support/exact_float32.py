"""Full-precision float32 products of cuBLAS, for tests that compare texts of float32 models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_float32() -> Iterator[None]:
    """Disable TF32 inside the block.

    Not by monkeypatch: the switch is computed by torch.backends.cuda.matmul and not in its `__dict__`, so pytest would
    delete it to undo, which that object refuses.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
