"""How the streaming W4A16 product cuts its work into tiles and runs: an estimate for each way.

Knows sizes only, no tensors.  The costs are in gemm/tuning.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slipstream_kernels.gemm.costs import StreamW4A16Costs
from slipstream_kernels.gemm.cuda.stream_plan import COUNTER_ROWS, MAX_UNITS, TILE_COUNTERS, UNIT_ROWS, Plan
from slipstream_kernels.gemm.tuning import H200

COLUMNS = (128, 160, 192, 224, 256)  # tokens of a tile, of what is compiled (sm90_stream_w4a16.cu)
CHUNK = 128  # summed columns


def plans(num_tokens: int, sizes: tuple[int, int], columns: int, most_ctas: int) -> Iterator[Plan]:
    """Ways to cut a product that may be the fastest.  sizes: output and input features.  most_ctas: that run at once.

    All CTAs with uneven runs; a whole number of CTAs to a tile; or a whole number of tiles to a CTA.
    """
    units, chunks = sizes[0] // UNIT_ROWS, sizes[1] // CHUNK
    token_tiles, of_rows = -(-num_tokens // columns), -(-units // MAX_UNITS)
    num_tiles = token_tiles * of_rows
    counts = [min(most_ctas, num_tiles * chunks)]
    if num_tiles >= most_ctas:
        rounds = -(-num_tiles // most_ctas)
        counts += [num_tiles // count for count in range(rounds, rounds + 2) if num_tiles % count == 0]
    else:
        most = min(most_ctas // num_tiles, chunks)
        counts += [num_tiles * count for count in (most, max(1, most - 1))]
    for num_ctas in dict.fromkeys(counts):
        plan = Plan(columns, num_tiles, num_ctas, token_tiles)
        if not plan.is_split or TILE_COUNTERS * num_tiles <= sizes[0] // COUNTER_ROWS:
            yield plan


def choose(
    num_tokens: int,
    sizes: tuple[int, int],
    count_ctas: Callable[[int], int],
    costs: StreamW4A16Costs = H200.stream_w4a16,
) -> Plan | None:
    """The plan with the least estimate; None if there is none.

    count_ctas: how many CTAs with tiles of so many tokens run at once; 0: they cannot run.
    """
    found = [
        plan
        for columns in COLUMNS
        if (most_ctas := count_ctas(columns))
        for plan in plans(num_tokens, sizes, columns, most_ctas)
    ]
    return min(found, key=lambda plan: estimate_us(plan, sizes[1] // CHUNK, costs), default=None)


def estimate_us(plan: Plan, chunks: int, costs: StreamW4A16Costs = H200.stream_w4a16) -> float:
    """Microseconds that the product takes.  chunks: of a tile."""
    longest = -(-plan.num_tiles * chunks // plan.num_ctas)  # run
    total = longest * (costs.chunk_us + costs.token_us * plan.columns)
    if plan.is_split:
        total += costs.split_us * plan.columns
        total += costs.uneven_us if plan.num_ctas % plan.num_tiles else 0.0
    return total
