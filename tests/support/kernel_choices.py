"""The kernel chosen for each product of real models, by rows and number of multiprocessors.  No GPU needed.

    python tests/support/kernel_choices.py        rewrites tests/golden/kernel_choices.txt

The table is made by the functions that choose at run time, gemm/choose.py and moe/choose.py.  The number of concurrent
clusters of CTAs is that of an H200 (132 multiprocessors), scaled for other GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "kernels")]

from slipstream_kernels.gemm import choose as dense  # noqa: E402
from slipstream_kernels.gemm import tuning  # noqa: E402
from slipstream_kernels.gemm.product import FP8_ROWS, INT8_ROWS, PLAIN_ROWS, WeightKind  # noqa: E402
from slipstream_kernels.gemm.product import Product as DenseProduct  # noqa: E402
from slipstream_kernels.moe import choose as moe  # noqa: E402
from slipstream_kernels.moe.product import Product as ExpertProduct  # noqa: E402

GOLDEN = ROOT / "tests/golden/kernel_choices.txt"
ROWS = (1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 512, 1024, 4096)
SM_COUNTS = (132, 114, 78)  # of an H200 or H100, an H100 for PCIe, an H20
CLUSTERS_OF_H200 = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 20, 7: 16, 8: 15}  # at once, by their CTAs


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


def products(model: Model) -> dict[str, Product]:
    q_size, kv_size = model.q_heads * model.head_dim, model.kv_heads * model.head_dim
    found = {"qkv": Product(q_size + 2 * kv_size, model.hidden), "o": Product(model.hidden, q_size)}
    if not model.experts:
        found["gate_up"] = Product(2 * model.intermediate, model.hidden, gated=True)
        found["down"] = Product(model.hidden, model.intermediate)
    return found


def expert_products(model: Model) -> dict[str, Product]:
    """The products of one expert."""
    if not model.experts:
        return {}
    gate_up = Product(2 * model.intermediate, model.hidden, gated=True)
    return {"gate_up": gate_up, "down": Product(model.hidden, model.intermediate)}


class Hopper:
    """A GPU whose kernels refuse nothing, as far as choices ask."""

    name = "NVIDIA H200"

    def __init__(self, num_sms: int) -> None:
        self.num_sms = num_sms

    def refusal(self, kernel: str, product: object) -> str | None:
        return None

    def count_clusters(self, kernel: str, product: object, config: tuple[int, ...]) -> int:
        streams = kernel in ("swap_ab_stream", "stream_w4a8", "stream_w4a16")  # of single CTAs
        splits = 1 if streams else config[2]  # (columns, tiles or warpgroups_m, splits, …)
        return CLUSTERS_OF_H200[splits] * self.num_sms // CLUSTERS_OF_H200[1]


class Form(NamedTuple):
    """A quantisation method: format of its weights, how rows are quantised, up to how many of them are not."""

    weight: str
    dtype: torch.dtype
    rows: str = PLAIN_ROWS
    most_plain: int = 0
    group_size: int = 0


E4M3 = torch.float8_e4m3fn
FORMS = {
    "bf16": Form("plain", torch.bfloat16),
    "fp8": Form("fp8", E4M3, FP8_ROWS, tuning.PLAIN_ROWS_OF_FP8),
    "wint4": Form("w4a16", torch.int32, group_size=128),
    "wint8": Form("w8a16", torch.int32),
    "w4a8_fp8": Form("w4a8", torch.int64, FP8_ROWS, group_size=128),
    "block_wise_fp8": Form("fp8_block", E4M3, FP8_ROWS, tuning.PLAIN_ROWS_OF_FP8, 128),
    "w8a8_int8": Form("int8", torch.int8, INT8_ROWS, tuning.PLAIN_ROWS_OF_INT8),
}
EXPERT_FORMS = {
    "w4a8_fp8": FORMS["w4a8_fp8"]._replace(weight="grouped_w4a8"),
    "wint4": FORMS["wint4"]._replace(weight="grouped_w4a16"),
    "bf16": FORMS["bf16"],
    "fp8": FORMS["fp8"],
    "mxfp4": Form("grouped_mxfp4", torch.int32, group_size=32),
}


def chosen(form: Form, rows: int, product: Product, num_sms: int) -> str:
    kind = _kind(form, product.out_features, product.in_features)
    device = Hopper(num_sms)
    quantised = PLAIN_ROWS if rows <= dense.plain_rows_of(kind, form.most_plain, device) else form.rows
    wanted = DenseProduct(kind, rows, quantised, torch.bfloat16, product.gated)
    return str(dense.choose(wanted, device))


def chosen_for_experts(form: Form, rows: int, model: Model, product: Product, num_sms: int) -> str:
    kind = _kind(form, product.out_features, product.in_features)._replace(num_experts=model.experts)
    wanted = ExpertProduct(kind, rows, rows * model.top_k, torch.bfloat16, product.gated)
    return str(moe.choose(wanted, Hopper(num_sms)))


def _kind(form: Form, out_features: int, in_features: int) -> WeightKind:
    device = torch.device("meta")
    return WeightKind(form.weight, out_features, in_features, form.dtype, device, form.group_size, form.rows)


def lines() -> Iterator[str]:
    """A line for each model, product, format and number of multiprocessors: runs of rows, and what they go to."""
    for name, model in MODELS.items():
        for num_sms in SM_COUNTS:
            for part, product in products(model).items():
                for name_of_form, form in FORMS.items():
                    kernels = [chosen(form, rows, product, num_sms) for rows in ROWS]
                    yield _line(name, part, name_of_form, num_sms, kernels)
            head = Product(model.vocab, model.hidden)
            yield _line(name, "lm_head", "bf16", num_sms, [chosen(FORMS["bf16"], rows, head, num_sms) for rows in ROWS])
            for part, product in expert_products(model).items():
                for name_of_form, form in EXPERT_FORMS.items():
                    kernels = [chosen_for_experts(form, rows, model, product, num_sms) for rows in ROWS]
                    yield _line(name, f"experts.{part}", name_of_form, num_sms, kernels)


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
