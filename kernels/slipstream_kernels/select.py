"""Choice of an implementation: a pure function of the op, the requested backend, the tensor and triton's refusal.

Keeps no state besides imported modules; triton is imported only when it is chosen.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch

BACKENDS = ("auto", "reference", "triton")
CUDA_BACKENDS = ("auto", "reference", "cuda")
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def select(op: str, backend: str, tensor: torch.Tensor, triton_refusal: str | None = None) -> ModuleType:
    """Return the module that implements `op`, such as "gemm.scaled_mm", for `tensor`'s device.

    triton_refusal: why the triton version cannot serve this call (None: it can).  "auto": triton for CUDA tensors
    unless refused, else the reference.  Raises ValueError if `backend` is unknown, or is "triton" and cannot run.
    """
    if backend == "reference":
        return load_module("reference", op)
    if backend == "auto":
        return load_module("triton" if tensor.is_cuda and triton_refusal is None else "reference", op)
    if backend != "triton":
        raise ValueError(f"backend: {backend!r} is not one of {', '.join(BACKENDS)}")
    if triton_refusal is not None:
        raise ValueError(f"backend: triton cannot run {_name(op)}: {triton_refusal}")
    module = load_module("triton", op)
    if not tensor.is_cuda and not _is_interpreting():
        needs = "needs CUDA, or TRITON_INTERPRET=1 before import"
        raise ValueError(f"backend: triton cannot run {_name(op)} on {tensor.device}: {needs}")
    return module


def select_cuda(
    op: str, module: str, backend: str, is_preferred: bool, refusal_of: Callable[[ModuleType], str | None]
) -> ModuleType | None:
    """The module <family>/cuda/<module>.py if it serves this call of `op`, else None.

    is_preferred: "auto" chooses it unless it refuses.  Raises ValueError if `backend` is "cuda" and it refuses.
    """
    if backend != "cuda" and not (backend == "auto" and is_preferred):
        return None
    cuda = load_module("cuda", module)
    refusal = refusal_of(cuda)
    if refusal is not None and backend == "cuda":
        raise ValueError(f"backend: cuda cannot run {_name(op)}: {refusal}")
    return cuda if refusal is None else None


def select_cuda_or_reference(
    op: str, backend: str, is_on_gpu: bool, refusal_of: Callable[[ModuleType], str | None]
) -> ModuleType:
    """The CUDA module or the reference, for ops without a version in Triton-lang."""
    if backend not in CUDA_BACKENDS:
        raise ValueError(f"backend: {backend!r} is not one of {', '.join(CUDA_BACKENDS)}")
    return select_cuda(op, op, backend, is_on_gpu, refusal_of) or load_module("reference", op)


@cache
def load_module(backend: str, op: str) -> ModuleType:
    """The implementation's module, cached: an import statement takes 5 us, and a forward pass has hundreds of ops."""
    family, name = op.split(".")
    return importlib.import_module(f"slipstream_kernels.{family}.{backend}.{name}")


def _name(op: str) -> str:
    """The name of an op without its family."""
    return op.rpartition(".")[2]


def _is_interpreting() -> bool:
    return importlib.import_module("slipstream_kernels.triton.interpreter").IS_INTERPRETING


def require_float(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless `tensor` is fp32, bf16 or fp16."""
    if tensor.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name}: dtype {tensor.dtype} is not float32, bfloat16 or float16")


def require_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `tensor` has exactly `shape`."""
    if tensor.shape != shape:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected {tuple(shape)}")


def require_bias(bias: torch.Tensor | None, num_features: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless the bias is None or [num_features] of `dtype`."""
    if bias is None:
        return
    require_shape("bias", bias, (num_features,))
    if bias.dtype != dtype:
        raise ValueError(f"bias: dtype {bias.dtype}, expected {dtype}")


def require_pairs(gated: bool, num_features: int) -> None:
    """Raise ValueError if a gated product's weight has an odd number of rows (gate and up)."""
    if gated and num_features % 2:
        raise ValueError(f"weight: {num_features} rows, gated products need pairs")


def require_unit_stride(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the last dimension of `tensor` is contiguous."""
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name}: last dimension must be contiguous, its stride is {tensor.stride(-1)}")
