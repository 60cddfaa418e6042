"""GPTQ: rounds a weight column by column and compensates each column's error in the columns not yet rounded.

Columns are processed by descending energy of their inputs, with group scales chosen before, so the stored format does
not depend on the order. Source: arXiv:2210.17323.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantization.grids import Grid

DAMPING = 0.01  # added to the diagonal, relative to its mean
COLUMNS = 128  # block size: errors are propagated once per block


@dataclass(frozen=True)
class Feedback:
    """What the inputs say of rounding, for all weights that read them: the order of columns, and how errors spread.

    order: [..., in]. factor: [..., in, in], of the ordered columns. Those of experts, each with its own inputs, are
    stacked.
    """

    order: Tensor
    factor: Tensor

    @classmethod
    def of(cls, gram: Tensor, num_rows: Tensor) -> Feedback:
        """gram: [..., in, in], sum of x xᵀ over num_rows [...] inputs.

        With few rows, correlations between features are mostly noise, which `_trusted` reduces.
        """
        order = torch.argsort(_diagonal(gram), descending=True)
        ordered = _ordered(_ordered(gram, order).mT, order).mT
        return cls(order, _inverse_factor(_trusted(ordered, num_rows)))


def round_by_feedback(weight: Tensor, feedback: Feedback, grid: Grid) -> Tensor:
    """weight: [..., out, in] fp32. Returns values on the grid, [..., out, in].

    The loop never indexes by a number on the device: the host would wait for it once a column.
    """
    order, factor = feedback.order, feedback.factor
    work, ordered = _ordered(weight, order), torch.empty_like(weight)
    for start in range(0, work.shape[-1], COLUMNS):
        end = min(start + COLUMNS, work.shape[-1])
        errors = torch.empty(*work.shape[:-1], end - start, device=work.device)
        for column in range(start, end):
            rounded = grid.nearest(order[..., column : column + 1], work[..., column : column + 1])
            ordered[..., column] = rounded[..., 0]
            error = (work[..., column] - rounded[..., 0]) / factor[..., column, column, None]
            work[..., column:end] -= error[..., None] * factor[..., None, column, column:end]
            errors[..., column - start] = error
        work[..., end:] -= errors @ factor[..., start:end, end:]
    return _ordered(ordered, torch.argsort(order))


def _ordered(rows: Tensor, order: Tensor) -> Tensor:
    """A copy of rows [..., out, in] with their columns in this order [..., in]."""
    return rows.gather(-1, order[..., None, :].expand_as(rows))


def _diagonal(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1)


def _trusted(gram: Tensor, num_rows: Tensor) -> Tensor:
    """The gram matrix with its off-diagonal shrunk, more so for few rows.

    KL of the demo model in 4 bits, without | with it: 512 tokens 0.066 | 0.041, 2048 0.040 | 0.033, 8192 0.032 | 0.031.
    """
    share = num_rows.double() / (num_rows + gram.shape[-1])
    shrunk = gram * share.to(gram.dtype)[..., None, None]
    _diagonal(shrunk).copy_(_diagonal(gram))
    return shrunk


def _inverse_factor(gram: Tensor) -> Tensor:
    """Upper Cholesky factor of the inverse of the damped gram matrix."""
    damped = gram.double()
    energy = _diagonal(damped)
    energy.add_(DAMPING * energy.mean(-1, keepdim=True) + 1e-12)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()
