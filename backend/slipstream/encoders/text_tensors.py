"""Texts as a BYTES tensor of Triton's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def strings(values: Sequence[Sequence[str]]) -> np.ndarray:
    """[rows, columns] of BYTES."""
    rows = [[text.encode("utf-8") for text in row] for row in values]
    return np.array(rows, dtype=np.object_).reshape(len(rows), -1)
