"""What Triton-lang would compile of kernels of drafts and draws, noted without a GPU: launches are made and do nothing.

A kernel is compiled for each combination of constants, types, integers that are 1 or that 16 divides, and pointers that
16 divides, but for the arguments that step_kernel exempts.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from slipstream_kernels.select import load_module
from slipstream_kernels.triton.step_kernel import INTEGERS, POINTERS

Compiled = tuple[object, ...]
# module of the contract -> the op's name in its family's folders, and its kernel
OPS = {
    "spec.accept_drafts": "_accept_kernel",
    "spec.update_step_inputs": "_advance_kernel",
    "spec.prepare_draft_inputs": "_level_kernel",
    "kv.compact_kv": "_move_kernel",
    "spec.unpack_step_inputs": "_unpack_kernel",
}

# module of the contract -> its functions, and their kernels
DRAWS = {
    "sample.penalties": (("apply_penalties", "apply_bias"), ("_count_kernel", "_penalise_kernel", "_bias_kernel")),
    "sample.token_masks": (("apply_token_masks",), ("_mask_kernel",)),
    "sample.logprobs": (("top_logprobs",), ("_logprob_chunk_kernel", "_logprob_row_kernel")),
}


def note_draws(monkeypatch: pytest.MonkeyPatch) -> set[Compiled]:
    """Likewise of what changes logits and of log-probabilities."""
    compiled: set[Compiled] = set()
    for op, (names, kernels) in DRAWS.items():
        contract, triton_module = importlib.import_module(f"slipstream_kernels.{op}"), load_module("triton", op)
        for name in kernels:
            monkeypatch.setattr(triton_module, name, NotingKernel(getattr(triton_module, name), compiled))
        reference = load_module("reference", op)
        both = SimpleNamespace(**{name: _in_both(name, triton_module, reference) for name in names})
        monkeypatch.setattr(contract, "select", lambda *_, both=both: both)
    return compiled


def note_compilations(monkeypatch: pytest.MonkeyPatch) -> set[Compiled]:
    """What the ops of drafts compile from now on; their results are the reference's."""
    compiled: set[Compiled] = set()
    for op, kernel_name in OPS.items():
        contract, triton_module = importlib.import_module(f"slipstream_kernels.{op}"), load_module("triton", op)
        monkeypatch.setattr(triton_module, kernel_name, NotingKernel(getattr(triton_module, kernel_name), compiled))
        name = op.rpartition(".")[2]
        both = SimpleNamespace(**{name: _in_both(name, triton_module, load_module("reference", op))})
        monkeypatch.setattr(contract, "select", lambda *_, both=both: both)
    return compiled


def _in_both(name: str, first: ModuleType, second: ModuleType) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        getattr(first, name)(*arguments)
        return getattr(second, name)(*arguments)

    return run


class NotingKernel:
    """In place of a kernel: a launch notes what would be compiled."""

    def __init__(self, kernel: Any, compiled: set[Compiled]) -> None:
        self._name, self._compiled = kernel.fn.__name__, compiled
        self._parameters = inspect.signature(kernel.fn).parameters

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: Any, num_warps: int, **constants: Any) -> None:
        names = [name for name in self._parameters if name not in constants]
        assert len(names) == len(arguments), self._name
        parts = [_key(name, value) for name, value in zip(names, arguments)]
        self._compiled.add((self._name, num_warps, *sorted(constants.items()), *parts))


def _key(name: str, value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), name in POINTERS or value.data_ptr() % 16 == 0
    return name if name in INTEGERS else "1" if value == 1 else value % 16 == 0
