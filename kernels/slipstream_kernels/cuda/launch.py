"""Calls entry points of the libraries: the structure of arguments, the current stream, CUDA's error texts."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping

import torch


def fields(
    pointers: Iterable[str], int64s: Iterable[str] = (), int32s: Iterable[str] = ()
) -> list[tuple[str, type[ctypes._SimpleCData]]]:
    """Fields of a ctypes.Structure in the order of the headers: pointers, 64-bit, 32-bit, without padding."""
    return [
        *((name, ctypes.c_void_p) for name in pointers),
        *((name, ctypes.c_int64) for name in int64s),
        *((name, ctypes.c_int32) for name in int32s),
    ]


def addresses(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, int | None]:
    """Data pointers of tensors; None: null."""
    return {name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}


def launch(name: str, library: ctypes.CDLL, params: ctypes.Structure, device: torch.device) -> None:
    """Run slipstream_<name> on the device's current stream.  Raises RuntimeError if it cannot be launched."""
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    with torch.cuda.device(device):
        check(name, library, getattr(library, f"slipstream_{name}")(ctypes.byref(params), stream))


def check(name: str, library: ctypes.CDLL, error: int) -> None:
    """Raise RuntimeError unless an entry point returned 0. error: a cudaError_t, or minus a cutlass::Status."""
    if error < 0:
        raise RuntimeError(f"{name}: CUTLASS status {-error}")
    if error != 0:
        library.slipstream_error_text.restype = ctypes.c_char_p
        raise RuntimeError(f"{name}: CUDA error {error}: {library.slipstream_error_text(error).decode()}")
