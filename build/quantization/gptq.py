"""GPTQ: round a weight column by column, each column's error fed into those that are still free.

Columns go in falling order of their inputs' energy, over groups whose scales were chosen before: the order leaves no
trace in what is stored. Source: arXiv:2210.17323.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantization.grids import Grid

DAMPING = 0.01  # of the mean diagonal, added to it
COLUMNS = 128  # whose errors are fed on together


def round_by_feedback(weight: Tensor, gram: Tensor, grid: Grid) -> Tensor:
    """weight: [out, in] fp32. gram: [in, in], sum of x xᵀ over the inputs. Returns values on the grid, [out, in]."""
    order = torch.argsort(gram.diagonal(), descending=True)
    work, result = weight[:, order].clone(), torch.empty_like(weight)
    factor = _inverse_factor(gram[order][:, order])
    for start in range(0, work.shape[1], COLUMNS):
        end = min(start + COLUMNS, work.shape[1])
        errors = torch.empty(work.shape[0], end - start, device=work.device)
        for column in range(start, end):
            rounded = grid.nearest(order[column : column + 1], work[:, column : column + 1])
            result[:, order[column]] = rounded[:, 0]
            error = (work[:, column] - rounded[:, 0]) / factor[column, column]
            work[:, column:end] -= error[:, None] * factor[column, column:end]
            errors[:, column - start] = error
        work[:, end:] -= errors @ factor[start:end, end:]
    return result


def _inverse_factor(gram: Tensor) -> Tensor:
    """Upper Cholesky factor of the inverse of the damped gram matrix."""
    damped = gram.double()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean() + 1e-12)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()
