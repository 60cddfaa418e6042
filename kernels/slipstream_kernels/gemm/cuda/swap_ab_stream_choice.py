"""How the streaming product cuts a weight into tiles and runs: an estimate for each way, of what bounds it.

Knows sizes only, no tensors.  The costs are in gemm/tuning.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from slipstream_kernels.gemm.costs import StreamCosts
from slipstream_kernels.gemm.cuda.stream_plan import MAX_UNITS, TILE_COUNTERS, UNIT_ROWS, Plan
from slipstream_kernels.gemm.cuda.swap_ab_choice import CHUNK_BYTES, Product
from slipstream_kernels.gemm.tuning import H200

COLUMNS = (128, 256)  # tokens of a tile, of what is compiled (sm90_swap_ab_stream.cu)
MAX_TOKENS = COLUMNS[-1]
COUNTER_ROWS = 16  # a weight comes with a counter for so many rows


def columns_for(num_tokens: int) -> int:
    return next(columns for columns in COLUMNS if num_tokens <= columns)


def plans(product: Product, columns: int, most_ctas: int) -> Iterator[Plan]:
    """Ways to cut the product that may be the fastest.  most_ctas: that run at once.

    As few tiles as can be, or a whole number of CTAs to a tile or of tiles to a CTA, or all CTAs with uneven runs.
    """
    units, chunks = product.out_features // UNIT_ROWS, -(-product.row_bytes // CHUNK_BYTES)
    least = -(-units // MAX_UNITS)
    sizes = [(least, most_ctas)]
    if least >= most_ctas:
        sizes.append((most_ctas * -(-least // most_ctas), most_ctas))
    else:
        for ctas in {most_ctas // least, max(1, most_ctas // least - 1)}:  # of a tile
            sizes += [(tiles, tiles * min(ctas, chunks)) for tiles in (least, most_ctas // ctas)]
    for num_tiles, num_ctas in dict.fromkeys(sizes):
        plan = Plan(columns, num_tiles, min(num_ctas, num_tiles * chunks))
        has_counters = TILE_COUNTERS * num_tiles <= -(-product.out_features // COUNTER_ROWS)
        if num_tiles <= units and (has_counters or not plan.is_split):
            yield plan


def choose(product: Product, most_ctas: int, costs: StreamCosts = H200.stream) -> Plan | None:
    """The plan with the least estimate; None if there is none.  most_ctas: that run at once; 0: the kernel cannot run.

    Where memory bounds them alike, fewer tiles: the same tokens are read less often.
    """
    if not most_ctas:
        return None
    found = plans(product, columns_for(product.num_tokens), most_ctas)
    return min(found, key=lambda plan: (estimate_us(product, plan, most_ctas, costs), plan.num_tiles), default=None)


def estimate_us(product: Product, plan: Plan, most_ctas: int, costs: StreamCosts = H200.stream) -> float:
    """Microseconds that the product takes."""
    chunks = -(-product.row_bytes // CHUNK_BYTES)
    longest = -(-plan.num_tiles * chunks // plan.num_ctas)  # run
    rows = -(-product.out_features // (UNIT_ROWS * plan.num_tiles)) * UNIT_ROWS + plan.columns
    idle = 1 - plan.num_ctas / most_ctas
    memory = product.out_features * product.row_bytes / costs.bytes_per_us * (1 + costs.idle * idle)
    intake_rate = min(costs.cta_bytes_per_us, costs.sm_bytes_per_us * most_ctas / plan.num_ctas)
    intake = longest * rows * CHUNK_BYTES / intake_rate
    products = longest * plan.slot_floats * CHUNK_BYTES / costs.products_per_us
    total = costs.start_us + -(-longest // chunks) * costs.segment_us + max(memory, intake, products)
    if plan.is_split:
        total += 4 * plan.slot_floats / costs.sum_bytes_per_us
        total += costs.uneven_us if plan.num_ctas % plan.num_tiles else 0.0
    return total
