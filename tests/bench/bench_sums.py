"""What the sum of a tensor over the ranks of a model takes, by its size: the engine's own choice, and each way alone.

    python tests/bench/bench_sums.py --ranks 2 [--device cuda] [--kib 4,16,64,256,1024,4096] [--out sums.jsonl]

`engine` is what a layer calls (worker/process_group.py); `library` is torch.distributed's all-reduce by NCCL, or by
gloo on a CPU; `short`, `wide`, `short_parts` and `wide_parts` are the ways of our own kernel that the engine has, each
up to its largest tensor, `one_shot` and `two_shot` are PyTorch's kernels, all over symmetric memory, which the GPUs
must have. On GPUs many sums follow each other in a CUDA graph, as those of the layers do. A figure is the slowest
rank's, in us of a sum.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/bench"))

from measures import emit, numbers  # noqa: E402
from slipstream.nn.parallel import Parallel  # noqa: E402
from slipstream.worker.hardware import Hardware  # noqa: E402
from slipstream.worker.process_group import file_store, join, leave  # noqa: E402
from slipstream_kernels.comm.cuda.rank_sum import RankSum, Way  # noqa: E402

SUMS = 64  # that follow each other
ROUNDS = 9
Sum = Callable[[Tensor], Tensor]


def ways(own: Hardware, largest: int) -> Iterator[tuple[str, Sum, int]]:
    """With the bytes of the largest tensor that is summed so.  largest: of all."""
    collectives = own.parallel.collectives
    assert collectives is not None
    yield "engine", collectives.sum, largest
    yield "library", _by_library, largest
    if own.device.type == "cuda":
        own_sum = None if collectives.symmetric is None else collectives.symmetric.own  # type: ignore[attr-defined]
        for way in () if own_sum is None else own_sum.ways:
            name = ("wide" if way.is_wide else "short") + "_parts" * way.in_parts
            yield name, partial(_by_way, own_sum, way), way.most_bytes
        yield from _by_symmetric_memory(own, largest)


def _by_library(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor


def _by_way(own: RankSum, way: Way, tensor: Tensor) -> Tensor:
    ways, own.ways = own.ways, (way,)
    try:
        return own(tensor)
    finally:
        own.ways = ways


def _by_symmetric_memory(own: Hardware, largest: int) -> Iterator[tuple[str, Sum, int]]:
    import torch.distributed._symmetric_memory as symmetric

    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    buffer = symmetric.empty(largest // own.dtype.itemsize, dtype=own.dtype, device=own.device)
    symmetric.rendezvous(buffer, group)

    def one_shot(tensor: Tensor) -> Tensor:
        found: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer[: len(tensor)], tensor, "sum", group)
        return found

    def two_shot(tensor: Tensor) -> Tensor:
        own_part = buffer[: len(tensor)]
        own_part.copy_(tensor)
        torch.ops.symm_mem.two_shot_all_reduce_(own_part, "sum", group)
        return own_part.clone()

    yield "one_shot", one_shot, largest
    yield "two_shot", two_shot, largest


def microseconds(add: Sum, tensor: Tensor) -> float:
    """The least of several rounds. Zeros are added, which stay what they are."""

    def run() -> None:
        for _ in range(SUMS):
            add(tensor)

    run()
    is_gpu = tensor.device.type == "cuda"
    replay: Callable[[], object] = run
    if is_gpu:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread that asks the device
            run()
        replay = graph.replay
    times = []
    for _ in range(ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        replay()
        if is_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / SUMS)
    return min(times) * 1e6


def measure(rank: int, arguments: argparse.Namespace, meeting: str) -> None:
    """What a rank does; the first prints. meeting: a file that does not exist yet."""
    device = torch.device(arguments.device, rank) if arguments.device == "cuda" else torch.device("cpu")
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    parallel = Parallel(rank, arguments.ranks)
    own = Hardware(device, dtype, dtype, parallel)
    own = join(file_store(meeting, own), own, is_ordered=False)
    sizes = [kib << 10 for kib in arguments.kib]
    for name, add, most in ways(own, max(sizes)):
        for size in (size for size in sizes if size <= most):
            assert own.parallel.collectives is not None
            mine = torch.tensor([microseconds(add, torch.zeros(size // dtype.itemsize, dtype=dtype, device=device))])
            slowest = float(own.parallel.collectives.gather(mine.to(device)).max())
            if rank == 0:
                record: dict[str, Any] = {"what": "sum", "way": name, "ranks": arguments.ranks, "kib": size >> 10}
                emit({**record, "us": round(slowest, 2)}, arguments.out)
    leave(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kib", type=numbers, default=[4, 16, 64, 256, 1024, 4096], help="sizes of a tensor")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        run = partial(measure, arguments=arguments, meeting=str(Path(folder) / "ranks"))
        processes = [context.Process(target=run, args=(rank,)) for rank in range(arguments.ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if failed := [rank for rank, process in enumerate(processes) if process.exitcode]:
            raise SystemExit(f"rank {failed[0]} failed")


if __name__ == "__main__":
    main()
