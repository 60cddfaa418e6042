"""Factors per input feature that reduce quantisation error: AWQ's for 4-bit weights, SmoothQuant's for int8 rows.

Sources: arXiv:2306.00978 (AWQ), arXiv:2211.10438 (SmoothQuant).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quantization.calibration import InputStatistics

STEPS = 20  # of the exponent, between 0 and 1
SMALLEST = 1e-4


def awq_factors(
    weight: Tensor,
    inputs: InputStatistics,
    quantised: Callable[[Tensor, InputStatistics], Tensor],
    shared: Callable[[Tensor], Tensor],
) -> Tensor:
    """[in]: input magnitudes to the power with the least error of the layer's outputs; ones if none reduces it.

    weight: [out, in] fp32. quantised: quantises a weight, given its inputs. shared: makes factors that can be folded.
    Tries the magnitudes with and without dividing them by those of the weights.
    """
    energy = (inputs.gram.diagonal() / inputs.num_tokens).sqrt().clamp(min=SMALLEST)
    size = weight.abs().mean(0).clamp(min=SMALLEST)
    best = torch.ones_like(energy)
    least = output_error(quantised(weight, inputs) - weight, inputs)
    for step in range(1, STEPS + 1):
        share = step / STEPS
        for raw in (energy**share, energy**share / size ** (1 - share)):
            factors = shared(raw / (raw.amax() * raw.amin()).sqrt())
            error = output_error(quantised(weight * factors, inputs.rescaled(factors)) / factors - weight, inputs)
            if error < least:
                best, least = factors, error
    return best


def output_error(difference: Tensor, inputs: InputStatistics) -> float:
    """Squared change of the layer's outputs, summed over the calibration text. difference: [out, in] of weights."""
    return float(((difference @ inputs.gram) * difference).sum())


def smoothing_factors(weight: Tensor, inputs: InputStatistics, strength: float) -> Tensor:
    """[in]: largest input ^ strength / largest weight ^ (1 - strength), to divide inputs by and multiply weights by."""
    inputs_largest, weights_largest = inputs.largest.clamp(min=SMALLEST), weight.abs().amax(0).clamp(min=SMALLEST)
    return (inputs_largest**strength / weights_largest ** (1 - strength)).clamp(min=SMALLEST)
