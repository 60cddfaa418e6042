"""Triton-lang's interpreter where tests compare bits: its products made alike for all rows."""

from __future__ import annotations

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def sum_rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's products summed in double precision.

    With some processors the order in which numpy's library adds depends on the place of a row in the matrix, which a
    tensor core's does not.
    """

    def create_dot(
        _: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *__: object
    ) -> TensorHandle:
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
