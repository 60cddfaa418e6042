"""The ops of deterministic mode in plain torch, each row by itself: equal rows give equal bits, as on a GPU.

Engines on a CPU that run them show what is around these ops.  All other products and attention give results that
depend on the number of rows, far beyond rounding: a model that takes one of them is found.  What is left are ops whose
rows do not depend on each other, if they have a multiple of 32 features: a library's loops treat those that are left
over differently.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch
from slipstream_kernels import select
from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.attention.latent_call import LatentCall
from slipstream_kernels.attention.ragged_call import RaggedCall
from slipstream_kernels.gemm import kernels as dense
from slipstream_kernels.kv.reference.write_latent import read_latents
from slipstream_kernels.moe import kernels as moe
from slipstream_kernels.routing import Routing
from torch import Tensor


def compute_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the references of these ops; what they stand in for depends on the number of rows."""
    load = select.load_module
    own = {f"{family}.{function.__name__}": function for family, function in OPS}

    def load_module(backend: str, op: str) -> ModuleType:
        name = op.partition(".")[2]
        if op in own:
            return cast("ModuleType", SimpleNamespace(**{name: own[op]}))
        module = load(backend, op)
        if not op.startswith("attention.") or name == "merge_attention":
            return module

        def attend(call: AttentionCall | LatentCall | RaggedCall) -> object:
            result = getattr(module, name)(call)
            _crowd(call.out)
            return result

        return cast("ModuleType", SimpleNamespace(**{name: attend}))

    monkeypatch.setattr(select, "load_module", load_module)
    for table, kept in ((dense.KERNELS, "invariant_mm"), (moe.KERNELS, "invariant_grouped_mm")):
        for name, kernel in table.items():
            if name != kept:
                monkeypatch.setitem(table, name, replace(kernel, run=_crowded(kernel.run)))  # type: ignore[arg-type]
    for name in ("mm", "bmm"):
        monkeypatch.setattr(torch, name, _crowded(getattr(torch, name)))


def _crowded(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*arguments: object, **options: object) -> Tensor:
        return _crowd(product(*arguments, **options))

    return run


def _crowd(rows: Tensor) -> Tensor:
    return rows.mul_(1 + 0.01 * rows.shape[-2])


def invariant_mm(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    matrix = weight if scales is None else weight.to(x.dtype) * scales[:, None]
    y = torch.stack([matrix @ row.clone() for row in x]) if len(x) else x.new_empty(0, len(weight))
    return y if bias is None else y + bias


def invariant_grouped_mm(x: Tensor, weight: Tensor, routing: Routing, scales: Tensor | None, by_token: bool) -> Tensor:
    matrices = weight if scales is None else weight.to(x.dtype) * scales[..., None]
    y = x.new_full((routing.num_rows, weight.shape[1]), float("nan"))
    bounds = routing.offsets.tolist()
    for expert, (first, last) in enumerate(itertools.pairwise(bounds)):
        for row in range(first, last):
            y[row] = matrices[expert] @ x[routing.tokens[row] if by_token else row].clone()
    return y


def invariant_attention(call: AttentionCall) -> None:
    """Without windows, slopes, caps and sinks."""
    cache, size = call.cache, call.cache.block_size
    for row, slots in _keys_of_rows(call, size):
        rows = slots // size, slice(None), slots % size
        keys, values = cache.key[rows].transpose(0, 1).clone(), cache.value[rows].transpose(0, 1).clone()
        q = call.q[row].unflatten(0, (cache.num_kv_heads, -1)).clone()
        probs = torch.softmax((q @ keys.transpose(1, 2)) * call.options.scale, dim=-1)
        call.out[row] = (probs @ values).flatten(0, 1)


def _keys_of_rows(call: AttentionCall | LatentCall, size: int) -> Iterator[tuple[int, Tensor]]:
    """Each row and the slots of its keys, in the order of their positions."""
    metadata = call.metadata
    starts, tree_mask = metadata.query_start_loc.tolist(), metadata.tree_mask
    for request, seq_len in enumerate(metadata.seq_lens.tolist()):
        prefix = seq_len - (starts[request + 1] - starts[request])
        for row in range(starts[request], starts[request + 1]):
            own = list(range(row - starts[request] + 1))
            if tree_mask is not None:
                own = [bit for bit in range(64) if int(tree_mask[row]) >> bit & 1]
            places = torch.tensor([*range(prefix), *(prefix + place for place in own)])
            if seq_len:
                yield row, metadata.block_tables[request].long()[places // size] * size + places % size
            else:
                call.out[row] = 0


def invariant_head_mm(x: Tensor, weight: Tensor, out: Tensor) -> None:
    for row in range(len(x)):
        out[row] = (weight @ x[row].clone()[..., None])[..., 0]


def invariant_latent_attention(call: LatentCall) -> None:
    for row, slots in _keys_of_rows(call, call.cache.block_size):
        latents = read_latents(call.cache, slots).clone()
        probs = torch.softmax((call.q[row].clone() @ latents.t()) * call.scale, dim=-1)
        call.out[row] = probs @ latents[:, : call.rank].clone()


OPS = (
    ("gemm", invariant_mm),
    ("gemm", invariant_head_mm),
    ("moe", invariant_grouped_mm),
    ("attention", invariant_attention),
    ("attention", invariant_latent_attention),
)
