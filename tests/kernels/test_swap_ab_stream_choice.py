"""Which kernel makes products of 1 to 256 rows: the fastest that was measured; and how tiles and runs are cut."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
from pathlib import Path

import kernel_choices
import pytest
from slipstream_kernels import ops
from slipstream_kernels.cuda import build
from slipstream_kernels.gemm.cuda import swap_ab_stream_choice
from slipstream_kernels.gemm.cuda.stream_plan import MAX_UNITS, Plan
from slipstream_kernels.gemm.cuda.swap_ab_choice import Product
from slipstream_kernels.gemm.cuda.swap_ab_stream_choice import COLUMNS

# us of one H200 by number of rows: each product behind a norm, cold weights, in a CUDA graph.  other: of the kernels
# that follow in the table, with silu(gate) * up behind a gated one.  wint4: each after itself; other: as
# the table was without stream_w4a16
TIMES = json.loads((Path(__file__).parents[1] / "golden" / "product_times.json").read_text())
LOSS, TOTAL_LOSS = 1.07, 1.004  # of the fastest, in one cell and in all


def test_the_fastest_that_was_measured_is_chosen() -> None:
    taken, least = 0.0, 0.0
    for cell in TIMES:
        product = kernel_choices.Product(cell["out_features"], cell["in_features"], cell["gated"])
        for rows, us in cell["us"].items():
            variant = kernel_choices.chosen(kernel_choices.FORMS[cell["format"]], int(rows), product, 132)
            chosen = us.get(variant.split("/")[0], us["other"])
            assert chosen <= LOSS * min(us.values()), (cell, rows, variant)
            taken, least = taken + chosen, least + min(us.values())
    assert taken <= TOTAL_LOSS * least


def test_plans_can_run() -> None:
    shapes = itertools.product((16, 32, 144, 3584, 10240, 57344, 128256), (16, 128, 4096, 28672))
    for (out_features, in_features), num_sms in itertools.product(shapes, (1, 7, 16, 78, 114, 132)):
        for columns in COLUMNS:
            product = Product(columns, out_features, in_features, False)
            found = list(swap_ab_stream_choice.plans(product, columns, num_sms))
            assert found or out_features < 64, (product, num_sms)
            for plan in found:
                check_plan(product, plan, num_sms)


def check_plan(product: Product, plan: Plan, num_sms: int) -> None:
    """As `fits` of sm90_swap_ab_stream.cu, and counters of ops.scaled_mm_counters suffice."""
    units, chunks = product.out_features // 16, -(-product.row_bytes // 128)
    assert 1 <= plan.num_tiles <= units and 1 <= plan.num_ctas <= min(num_sms, plan.num_tiles * chunks)
    assert -(-units // plan.num_tiles) <= MAX_UNITS
    assert (plan.num_tiles * chunks + 1) * (plan.num_ctas + 1) < 1 << 32
    assert not plan.is_split or 4 * plan.num_tiles <= -(-product.out_features // 16)
    assert 2 * 4 * plan.num_ctas * plan.slot_floats <= ops.fp8_sums_bytes(num_sms)


def test_other_numbers_of_sms_share_work_evenly() -> None:
    """No plan leaves more than a fifth of the SMs idle, or some with two fifths more work than others."""
    for num_sms, (out_features, in_features) in itertools.product((66, 78, 114, 132), ((4096, 14336), (8192, 28672))):
        plan = swap_ab_stream_choice.choose(Product(128, out_features, in_features, False), num_sms)
        assert plan is not None
        chunks = plan.num_tiles * in_features // 128
        assert plan.num_ctas >= 0.8 * num_sms and -(-chunks // plan.num_ctas) <= 1.4 * chunks / num_sms


def test_without_a_ctas_place_there_is_no_plan() -> None:
    assert swap_ab_stream_choice.choose(Product(128, 4096, 4096, False), 0) is None


def test_every_chunk_is_in_one_run(runs_check: Path) -> None:
    draw = random.Random(0)
    sizes = [(1, 1, 1), (33, 112, 132), (396, 28, 132), (80, 64, 132), (448, 64, 132)]
    for _ in range(200):
        num_tiles, num_chunks = draw.randint(1, 300), draw.randint(1, 250)
        sizes.append((num_tiles, num_chunks, draw.randint(1, min(264, num_tiles * num_chunks))))
    numbers = [str(number) for size in sizes for number in size]
    done = subprocess.run([runs_check, *numbers], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["checked"] * len(sizes), done.stdout[:500]


@pytest.fixture(scope="module")
def runs_check(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("runs") / "check"
    flags = ["-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover"]
    source = root / "tests" / "kernels" / "stream_runs_check.cc"
    subprocess.run([compiler, *flags, f"-I{build.DEVICE_CODE}", str(source), "-o", str(program)], check=True)
    return program
