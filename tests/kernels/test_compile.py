"""Every kernel compiles, also without a GPU: the interpreter accepts what the compiler refuses.

For every GPU of SHARED_MEMORY. Kernels that did not change since they were recorded are not compiled again
(compile_kernels.py): where Triton-lang is another version than the record's, a target takes a minute or more on two
cores, so that other GPUs than Hopper want SLIPSTREAM_LONG_TESTS=1 then.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from compile_kernels import SHARED_MEMORY, read_record
from kernel_signatures import SMALL_LATENT_TILES
from slipstream_kernels.attention.triton import invariant_latent_attention, latent_attention

if TYPE_CHECKING:
    from slipstream_kernels.attention.latent_call import LatentCall

IS_LONG = os.environ.get("SLIPSTREAM_LONG_TESTS") == "1"
# their tiles of 64 rows and of 64 or 32 keys are not chosen there: test_tiles_of_latent_attention_fit_small_gpus
LARGE = {"_latent_attention_kernel", "_invariant_latent_attention_kernel"}
# prints what a compiler gives now for the kernel that the record names, and what the record says
COMPILE_ONE = """
import compile_kernels as c
index = next(i for i, kernel in enumerate(c.KERNELS) if kernel[1] == "_accept_kernel")
print(*c.compile_kernel(index, 120), *c.read_record().get(c.hash_of(index, 120), ()))
"""


def compiler_environment(root: Path, cache: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(root / "tests" / "support")}


@pytest.mark.skipif(
    not read_record() and torch.cuda.is_available(),
    reason="the record is of another version of Triton-lang, and a GPU's tests compile what they run",
)
@pytest.mark.parametrize("target", SHARED_MEMORY if IS_LONG or read_record() else [90])
def test_every_kernel_compiles(target: int, root: Path, tmp_path: Path) -> None:
    environment = compiler_environment(root, tmp_path)
    script = root / "tests" / "support" / "compile_kernels.py"
    done = subprocess.run(
        [sys.executable, script, str(target)], env=environment, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = re.findall(r"^(_\w+_kernel) (\d+) (\d+)$", done.stdout, re.MULTILINE)
    sources = (root / "kernels" / "slipstream_kernels").rglob("triton/*.py")
    written = {name for path in sources for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.MULTILINE)}
    assert {name for name, *_ in compiled} == written
    assert all(int(size) for _, size, _ in compiled) or target < 89
    assert {name for name, _, shared in compiled if int(shared) > SHARED_MEMORY[target]} <= LARGE


@pytest.mark.skipif(not read_record(), reason="the record is of another version of Triton-lang")
def test_the_record_says_what_a_compiler_gives(root: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILE_ONE],
        env=compiler_environment(root, tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
    )
    name, size, shared, *recorded = done.stdout.split()
    assert recorded in ([], [name, size, shared]), done.stderr  # not recorded: the kernel was changed since
    assert int(size) > 0


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_tiles_of_latent_attention_fit_small_gpus(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_attention, "has_small_shared_memory", lambda device: True)
    cache = SimpleNamespace(is_fp8=False, block_size=64)
    q = torch.empty(1, 16, 64, dtype=torch.bfloat16)
    call = cast("LatentCall", SimpleNamespace(q=q, cache=cache, metadata=SimpleNamespace(max_query_len=tokens)))
    rows = latent_attention._tile_rows(call)
    assert (rows, latent_attention._tile_keys(call, rows)) in {(16, 64), *SMALL_LATENT_TILES}


@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("tokens", [1, 4096])
def test_tiles_of_deterministic_mode_depend_on_the_gpu_alone(
    tokens: int, is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled for compute capability 8.9, the small one takes 72 to 80 KiB, with FP8 rows, too."""
    monkeypatch.setattr(invariant_latent_attention, "has_small_shared_memory", lambda device: is_small)
    for block_size, keys in ((64, 16 if is_small else 32), (16, 16)):
        cache = SimpleNamespace(is_fp8=False, block_size=block_size)
        for dtype, expected in (
            (torch.bfloat16, (64, keys, 1 if is_small else 2)),
            (torch.float32, (16, 16, 1)),
        ):
            q = torch.empty(tokens, 16, 8, dtype=dtype)
            call = cast("LatentCall", SimpleNamespace(q=q, cache=cache, metadata=SimpleNamespace(max_query_len=tokens)))
            assert invariant_latent_attention._tile(call) == expected
