"""Which kernel a product of a real model goes to, by rows and by the GPU's number of multiprocessors.  No GPU needed.

    python tests/support/kernel_choices.py        writes tests/golden/kernel_choices.txt anew

The functions that choose at run time make the table, asked in the order in which the layers ask them.  How many
clusters of CTAs run at once is what an H200 says (132 multiprocessors), in proportion for others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "kernels")]

from slipstream_kernels.attention.cuda import prefill_attention  # noqa: E402
from slipstream_kernels.fp8 import E4M3  # noqa: E402
from slipstream_kernels.gemm import scaled_mm  # noqa: E402
from slipstream_kernels.gemm.cuda import (  # noqa: E402
    int4_mm,
    int4_stream,
    int8_mm,
    mixed_gemm,
    mixed_gemm_w4a8_choice,
    skinny_gemm,
    swap_ab_choice,
    w4a8_gemm,
)
from slipstream_kernels.gemm.cuda.cutlass_gemm import choose_tile  # noqa: E402
from slipstream_kernels.moe import grouped_int4_mm  # noqa: E402
from slipstream_kernels.moe.cuda import record_experts  # noqa: E402

GOLDEN = ROOT / "tests/golden/kernel_choices.txt"
ROWS = (1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 512, 1024, 4096)
SM_COUNTS = (132, 114, 78)  # of an H200 or H100, an H100 for PCIe, an H20
CLUSTERS_OF_H200 = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 20, 7: 16, 8: 15}  # at once, by their CTAs
PROMPT_CONTEXT = 8192  # keys that the rows of a prompt's last chunk see


@dataclass(frozen=True)
class Model:
    """experts, top_k: of a MoE layer, 0 of a dense one; then `intermediate` is an expert's."""

    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0
    top_k: int = 0


MODELS = {
    "Llama-3-8B": Model(4096, 32, 8, 128, 14336, 128256),
    "Llama-3-70B": Model(8192, 64, 8, 128, 28672, 128256),
    "Llama-3.2-1B": Model(2048, 32, 8, 64, 8192, 128256),
    "Llama-2-13B": Model(5120, 40, 40, 128, 13824, 32000),
    "Mistral-7B": Model(4096, 32, 8, 128, 14336, 32768),
    "Qwen2.5-7B": Model(3584, 28, 4, 128, 18944, 152064),
    "Qwen2.5-32B": Model(5120, 40, 8, 128, 27648, 152064),
    "Qwen2.5-72B": Model(8192, 64, 8, 128, 29568, 152064),
    "Qwen3-8B": Model(4096, 32, 8, 128, 12288, 151936),
    "Qwen3-14B": Model(5120, 40, 8, 128, 17408, 151936),
    "Mixtral-8x7B": Model(4096, 32, 8, 128, 14336, 32000, experts=8, top_k=2),
    "Qwen3-30B-A3B": Model(2048, 32, 4, 128, 768, 151936, experts=128, top_k=8),
}


class Product(NamedTuple):
    """gated: silu of the first half of the outputs times the second."""

    out_features: int
    in_features: int
    gated: bool = False


Choice = Callable[[int, Product, int], str]  # rows, product, multiprocessors -> kernel/variant


def products(model: Model) -> dict[str, Product]:
    q_size, kv_size = model.q_heads * model.head_dim, model.kv_heads * model.head_dim
    found = {"qkv": Product(q_size + 2 * kv_size, model.hidden), "o": Product(model.hidden, q_size)}
    if not model.experts:
        found["gate_up"] = Product(2 * model.intermediate, model.hidden, gated=True)
        found["down"] = Product(model.hidden, model.intermediate)
    return found


def clusters_at_once(num_sms: int, splits: int) -> int:
    return CLUSTERS_OF_H200[splits] * num_sms // CLUSTERS_OF_H200[1]


def _name(kernel: str, variant: tuple[object, ...]) -> str:
    return f"{kernel}/{','.join(str(int(value)) for value in variant)}"  # type: ignore[call-overload]


def _skinny(rows: int, product: Product, num_sms: int) -> str:
    num_units = product.out_features // 2 if product.gated else product.out_features
    variant = skinny_gemm.choose(rows, num_units, product.in_features, product.gated, num_sms)
    return _name("skinny_gemm", variant)


def _swap_ab(rows: int, product: Product, num_sms: int, weights: str, itemsize: int) -> str | None:
    sized = swap_ab_choice.Product(rows, product.out_features, product.in_features * itemsize, product.gated)
    if not swap_ab_choice.is_chosen(sized, weights):
        return None
    variant = swap_ab_choice.choose(sized, lambda found: clusters_at_once(num_sms, found.splits))
    return _name("swap_ab_gemm", variant)


def unquantised(rows: int, product: Product, num_sms: int) -> str:
    if rows <= skinny_gemm.MAX_CHOSEN_TOKENS[torch.bfloat16]:
        return _skinny(rows, product, num_sms)
    return _swap_ab(rows, product, num_sms, "plain", 2) or "library"


def fp8(rows: int, product: Product, num_sms: int) -> str:
    if rows <= skinny_gemm.MAX_CHOSEN_TOKENS[E4M3]:
        return _skinny(rows, product, num_sms)
    chosen = _swap_ab(rows, product, num_sms, "channel", 1)
    return chosen or ("scaled_mm" if rows <= scaled_mm.MAX_OWN_ROWS else "library")


def wint4(rows: int, product: Product, num_sms: int) -> str:
    if rows > int4_mm.MAX_STREAMED_TOKENS:
        return "int4_dequantise+library"
    if rows <= int4_stream.MAX_ROWS_TOKENS:
        return "int4_rows"
    return _name("int4_stream", (-(-rows // int4_stream.MAX_TOKENS),))


def wint8(rows: int, product: Product, num_sms: int) -> str:
    if rows <= int8_mm.MAX_STREAMED_TOKENS:
        return _skinny(rows, product, num_sms)
    x = torch.empty((rows, product.in_features), dtype=torch.bfloat16, device="meta")
    if int8_mm._is_written_out(x):
        return "int8_dequantise+library"
    sizes = product.out_features, product.in_features
    return _name("mixed_gemm", mixed_gemm.choose(rows, sizes, lambda found: clusters_at_once(num_sms, found.splits)))


def w4a8(rows: int, product: Product, num_sms: int) -> str:
    sizes = product.out_features, product.in_features
    variant = mixed_gemm_w4a8_choice.choose(rows, sizes, lambda found: clusters_at_once(num_sms, found.splits))
    if variant is not None:
        return _name("mixed_gemm_w4a8", variant)
    tile = choose_tile(w4a8_gemm.TILES, rows, product.out_features, num_sms)
    return _name("w4a8_gemm", tile[:3])


FORMATS: dict[str, Choice] = {"bf16": unquantised, "fp8": fp8, "wint4": wint4, "wint8": wint8, "w4a8_fp8": w4a8}


def experts(rows: int, model: Model, out_features: int, num_sms: int) -> str:
    """Of 4-bit experts beside FP8 rows."""
    if rows * model.top_k >= grouped_int4_mm.FP8_ROWS_OF_RECORDS * model.experts:
        return "record_weights+grouped_mm"
    routing = SimpleNamespace(num_tokens=rows, num_rows=rows * model.top_k, num_experts=model.experts)
    return _name("record_experts", record_experts.choose(routing, out_features, num_sms))  # type: ignore[arg-type]


def prompt(rows: int, model: Model, num_sms: int) -> str:
    """Of the last rows of a prompt of PROMPT_CONTEXT tokens: the power of two of CTAs that share a tile's keys."""
    group = model.q_heads // model.kv_heads
    pack = group & -group
    splits = prefill_attention.splits_log2(rows * pack, 1, model.q_heads // pack, PROMPT_CONTEXT, num_sms)
    return _name("prefill_attention", (splits,))


def lines() -> Iterator[str]:
    """A line for each model, product, format and number of multiprocessors: runs of rows, and what they go to."""
    for name, model in MODELS.items():
        for num_sms in SM_COUNTS:
            for part, product in products(model).items():
                for form, choose in FORMATS.items():
                    yield _line(name, part, form, num_sms, [choose(rows, product, num_sms) for rows in ROWS])
            head = Product(model.vocab, model.hidden)
            yield _line(name, "lm_head", "bf16", num_sms, [unquantised(rows, head, num_sms) for rows in ROWS])
            yield _line(name, "attention", "prompts", num_sms, [prompt(rows, model, num_sms) for rows in ROWS])
            if model.experts:
                for part, size in (("gate_up", 2 * model.intermediate), ("down", model.hidden)):
                    chosen = [experts(rows, model, size, num_sms) for rows in ROWS]
                    yield _line(name, f"experts.{part}", "w4a8_fp8", num_sms, chosen)


def _line(model: str, part: str, form: str, num_sms: int, chosen: list[str]) -> str:
    runs = []
    for kernel, group in groupby(zip(ROWS, chosen), key=lambda pair: pair[1]):
        rows = [pair[0] for pair in group]
        runs.append(f"{rows[0]}-{rows[-1]} {kernel}" if len(rows) > 1 else f"{rows[0]} {kernel}")
    return f"{model} {part} {form} {num_sms}: " + "; ".join(runs)


def table() -> str:
    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(table())
