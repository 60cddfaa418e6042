"""Calls of CUDA libraries: both sides of the C interface agree on the arguments, and errors are in CUDA's words."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from slipstream_kernels.attention.cuda import (
    decode_attention,
    latent_attention,
    prefill_attention,
    prefill_stage,
    ragged_attention,
    verify_attention,
)
from slipstream_kernels.comm.cuda import rank_sum
from slipstream_kernels.cuda import build, launch
from slipstream_kernels.gemm.cuda import (
    int8_gemm,
    mixed_gemm,
    skinny_gemm,
    skinny_gemm_w4a16,
    stream_w4a8,
    stream_w4a16,
    swap_ab_gemm,
    swap_ab_stream,
    w4a8_gemm,
)
from slipstream_kernels.moe.cuda import grouped_gemm, grouped_stream
from slipstream_kernels.sample.cuda import sample

MIRRORS = {
    "swap_ab_params.h": swap_ab_gemm.SwapAbParams,
    "stream_w4a8_params.h": stream_w4a8.StreamW4A8Params,
    "stream_w4a16_params.h": stream_w4a16.StreamW4A16Params,
    "swap_ab_stream_params.h": swap_ab_stream.SwapAbStreamParams,
    "decode_params.h": decode_attention.DecodeParams,
    "grouped_gemm_params.h": grouped_gemm.GroupedGemmParams,
    "grouped_stream_params.h": grouped_stream.GroupedStreamParams,
    "mixed_gemm_params.h": mixed_gemm.MixedGemmParams,
    "skinny_gemm_w4a16_params.h": skinny_gemm_w4a16.SkinnyGemmW4A16Params,
    "int8_gemm_params.h": int8_gemm.Int8GemmParams,
    "latent_params.h": latent_attention.LatentParams,
    "prefill_params.h": prefill_attention.PrefillParams,
    "ragged_params.h": ragged_attention.RaggedParams,
    "prefill_stage_params.h": prefill_stage.PrefillStageParams,
    "rank_sum_params.h": rank_sum.RankSumParams,
    "sample_params.h": sample.SampleParams,
    "skinny_gemm_params.h": skinny_gemm.SkinnyGemmParams,
    "verify_params.h": verify_attention.VerifyParams,
    "w4a8_params.h": w4a8_gemm.W4a8Params,
}
TYPES = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


def test_every_header_has_a_mirror() -> None:
    assert {path.name for path in (build.DEVICE_CODE / "params").glob("*_params.h")} == set(MIRRORS)


@pytest.mark.parametrize("header", MIRRORS)
def test_c_and_python_agree_on_the_arguments(header: str) -> None:
    assert list(fields_of(header)) == MIRRORS[header]._fields_


@pytest.mark.parametrize("header", MIRRORS)
def test_arguments_have_no_padding(header: str) -> None:
    mirror = MIRRORS[header]
    used = getattr(mirror, mirror._fields_[0][0]).offset  # a kernel's arguments may begin with those of another
    used += sum(ctypes.sizeof(kind) for _, kind in mirror._fields_)
    assert used <= ctypes.sizeof(mirror) < used + 8  # at most behind the last field
    ends = [getattr(mirror, name).offset + ctypes.sizeof(kind) for name, kind in mirror._fields_]
    assert ends[-1] == used


def fields_of(header: str) -> Iterator[tuple[str, type]]:
    """(name, type) of the structure's fields as C declares them."""
    text = (build.DEVICE_CODE / "params" / header).read_text()
    constants = {name: int(value) for name, value in re.findall(r"^constexpr int (\w+) = (\d+);", text, re.MULTILINE)}
    for kind, star, names, count in re.findall(
        r"^  (?:const )?(\w+)(\*?) ([\w, ]+)(?:\[(\w+)\])?;", text, re.MULTILINE
    ):
        for name in names.split(", "):
            own = ctypes.c_void_p if star else TYPES[kind]
            yield name, own * constants[count] if count else own


def library_that_says(text: bytes) -> SimpleNamespace:
    def error_text(error: int) -> bytes:
        return text

    return SimpleNamespace(slipstream_error_text=error_text)


def test_errors_name_the_kernel_and_say_what_cuda_says() -> None:
    launch.check("sample", library_that_says(b"no error"), 0)
    with pytest.raises(RuntimeError, match=r"^sample: CUDA error 1: invalid argument$"):
        launch.check("sample", library_that_says(b"invalid argument"), 1)
    with pytest.raises(RuntimeError, match=r"^w4a8_gemm: CUTLASS status 7$"):
        launch.check("w4a8_gemm", library_that_says(b""), -7)


def test_entry_points_get_the_arguments_and_the_devices_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7 + device.index))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(entered.append(device.index)))

    def entry(params: object, stream: ctypes.c_void_p) -> int:
        seen = ctypes.cast(params, ctypes.POINTER(sample.SampleParams)).contents
        return 0 if (seen.num_rows, stream.value, entered) == (5, 10, [3]) else 1

    library = SimpleNamespace(slipstream_sample=entry, **vars(library_that_says(b"other arguments or another stream")))
    launch.launch("sample", library, sample.SampleParams(num_rows=5), torch.device("cuda", 3))


def test_addresses_are_those_of_the_tensors() -> None:
    tensor = torch.zeros(2)
    assert launch.addresses({"x": tensor, "bias": None}) == {"x": tensor.data_ptr(), "bias": None}
