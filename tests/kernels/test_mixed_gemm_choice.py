"""Which variant of mixed_gemm multiplies few rows with 4-bit weights: the fastest that was measured, or nearly."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hopper import CLUSTERS_AT_ONCE
from slipstream_kernels.gemm.cuda import mixed_gemm_pairs, mixed_gemm_w4a8_choice

# us of one H200 by weight, rows and variant (warpgroups_m x splits): cold weights, behind what quantises or splits
# rows, in a CUDA graph.  w4a8: FP8 rows; pairs: bf16 rows.
TIMES = json.loads((Path(__file__).parents[1] / "golden" / "mixed_gemm_times.json").read_text())
CHOICES = {"w4a8": mixed_gemm_w4a8_choice.choose, "pairs": mixed_gemm_pairs.choose}
LOSS, TOTAL_LOSS = 1.1, 1.01  # of the fastest, in one cell and in all


@pytest.mark.parametrize("kind", CHOICES)
def test_the_fastest_that_was_measured_is_chosen(kind: str) -> None:
    taken, least = 0.0, 0.0
    for size, of_rows in TIMES[kind].items():
        features = [int(number) for number in size.split(" x ")]
        for rows, times in of_rows.items():
            sizes = (features[0], features[1])
            variant = CHOICES[kind](int(rows), sizes, lambda variant: CLUSTERS_AT_ONCE[variant.splits])
            assert variant is not None
            chosen, fastest = times[f"{variant.warpgroups_m}x{variant.splits}"], min(times.values())
            assert chosen <= LOSS * fastest, (size, rows, variant, times)
            taken, least = taken + chosen, least + fastest
    assert least < taken <= TOTAL_LOSS * least


FEWER_SMS = {"MIG slice of 16 SMs": 16 / 132, "114 SMs": 114 / 132, "one cluster": 1 / 132}


@pytest.mark.parametrize("share", FEWER_SMS.values(), ids=FEWER_SMS)
@pytest.mark.parametrize("kind", CHOICES)
def test_what_is_chosen_runs_with_fewer_multiprocessors(kind: str, share: float) -> None:
    """A variant that does not hold its output features at once is refused, unless it is the one for passes."""
    num_passes = 0
    for rows, features, summed in itertools.product((1, 8, 9, 16, 17, 32), (16, 512, 4096, 57344), (128, 1024, 14336)):
        variant = CHOICES[kind](rows, (features, summed), lambda variant: int(share * CLUSTERS_AT_ONCE[variant.splits]))
        assert variant is not None and variant.splits <= summed // 128
        clusters = min(int(share * CLUSTERS_AT_ONCE[variant.splits]), features // 16)
        assert clusters, variant
        is_whole = features // 16 <= clusters * 4 * variant.warpgroups_m
        assert is_whole or (variant.warpgroups_m, variant.splits) == (4, 1), (rows, features, summed, variant)
        num_passes += not is_whole
    assert num_passes
