"""Which kernel makes FP8 products of 33 to 256 rows: the fastest that was measured; and how tiles and runs are cut."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kernel_choices
import pytest
from slipstream_kernels.cuda import build
from slipstream_kernels.gemm import tuning
from slipstream_kernels.gemm.cuda import swap_ab_choice, swap_ab_stream_choice
from slipstream_kernels.gemm.cuda.swap_ab_choice import Product
from slipstream_kernels.gemm.cuda.swap_ab_stream_choice import COMPILED, Plan, Variant

# of one H200, cold weights in a CUDA graph; the library's and scaled_mm's gate_up without the gate's launch
TIMES = json.loads((Path(__file__).parents[1] / "golden" / "fp8_product_times.json").read_text())
LOSS = 1.025  # of the fastest that a choice may take


@pytest.mark.parametrize("cell", TIMES, ids=lambda cell: f"{cell['product']} {cell['rows']}")
def test_the_fastest_that_was_measured_is_chosen(cell: dict[str, Any]) -> None:
    product = kernel_choices.Product(cell["out_features"], cell["in_features"], cell["product"].endswith("gate_up"))
    chosen = kernel_choices.chosen(kernel_choices.FORMS["fp8"], cell["rows"], product, 132)
    assert cell["us"][chosen] <= LOSS * min(cell["us"].values()), chosen


def test_estimates_are_near_what_was_measured() -> None:
    """Of plans within 5 % of a product's fastest, which the choice is between."""
    for cell in TIMES:
        of_stream = {name: us for name, us in cell["us"].items() if name.startswith("swap_ab_stream")}
        for name, us in of_stream.items():
            if us < 1.05 * min(of_stream.values()):
                plan = Plan(*map(int, name.split("/")[1].split(",")))
                product = Product(cell["rows"], cell["out_features"], cell["in_features"], False)
                assert swap_ab_stream_choice.estimate_us(product, plan, 132) == pytest.approx(us, rel=0.13), (
                    cell,
                    name,
                )


def test_the_library_is_taken_where_its_tiles_fill_the_gpu() -> None:
    """129 to 256 rows: 32 tiles of 128 weight rows leave most of it idle for 112 chunks; 64 tiles of 64 do not."""
    form = kernel_choices.FORMS["fp8"]
    for shape, kernel in (((4096, 14336), "swap_ab_stream"), ((8192, 8192), "library"), ((28672, 8192), "library")):
        chosen = kernel_choices.chosen(form, 256, kernel_choices.Product(*shape), 132)
        assert chosen.startswith(kernel), shape


def test_plans_can_run() -> None:
    shapes = itertools.product((16, 32, 144, 3584, 10240, 57344, 128256), (16, 128, 4096, 28672))
    for (out_features, in_features), num_sms in itertools.product(shapes, (1, 7, 16, 78, 114, 132)):
        for num_tokens, variant in (
            (33, Variant(64, 1)),
            (64, Variant(64, 2)),
            (128, Variant(128, 2)),
            (256, Variant(256, 2)),
        ):
            product = Product(num_tokens, out_features, in_features, False)
            found = list(swap_ab_stream_choice.plans(product, variant, num_sms))
            assert found or out_features < 64, (product, num_sms)
            for plan in found:
                check_plan(product, plan, num_sms)


def check_plan(product: Product, plan: Plan, num_sms: int) -> None:
    """As `fits` of sm90_swap_ab_stream.cu, and counters of ops.scaled_mm_counters suffice."""
    units, chunks = product.out_features // 16, -(-product.row_bytes // 128)
    assert 1 <= plan.num_tiles <= units and 1 <= plan.num_ctas <= min(num_sms, plan.num_tiles * chunks)
    assert -(-units // plan.num_tiles) <= dict(COMPILED[plan.columns])[plan.warpgroups]
    assert (plan.num_tiles * chunks + 1) * (plan.num_ctas + 1) < 1 << 32
    assert not plan.is_split or 4 * plan.num_tiles <= -(-product.out_features // 16)
    assert 2 * 4 * plan.num_ctas * plan.slot_floats <= swap_ab_stream_choice.sums_bytes(num_sms)


def test_other_numbers_of_sms_share_work_evenly() -> None:
    """No plan leaves more than a fifth of the SMs idle, or some with two fifths more work than others."""
    for num_sms, (out_features, in_features) in itertools.product((66, 78, 114, 132), ((4096, 14336), (8192, 28672))):
        product = Product(64, out_features, in_features, False)
        found = swap_ab_stream_choice.choose(product, lambda _, num_sms=num_sms: num_sms)
        assert found is not None
        plan, _ = found
        chunks = plan.num_tiles * in_features // 128
        assert plan.num_ctas >= 0.8 * num_sms and -(-chunks // plan.num_ctas) <= 1.4 * chunks / num_sms


def test_without_a_ctas_place_there_is_no_plan() -> None:
    assert swap_ab_stream_choice.choose(Product(64, 4096, 4096, False), lambda _: 0) is None


def test_clusters_at_once_are_as_an_h200_counts_them() -> None:
    for splits in (1, 2, 4):
        assert swap_ab_choice.usual_clusters(132, splits) == kernel_choices.CLUSTERS_OF_H200[splits]


def test_rows_of_clusters_are_those_of_the_table() -> None:
    """More rows than these are compared with the library."""
    from slipstream_kernels.gemm.kernels import MOST_ROWS_OF_CLUSTERS

    assert max(last for _, last in tuning.ranges_of("NVIDIA H200", "fp8", "swap_ab_gemm")) == MOST_ROWS_OF_CLUSTERS


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
