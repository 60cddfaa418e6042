"""The process of a rank whose loads take long, and say that they go on or do not: what rank_processes starts instead of
rank_main. Every node's rank of this kind may be made by a sitecustomize.py, see `patch`."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch.distributed as dist
from slipstream.core.config import EngineConfig
from slipstream.core.start_up import StartUp
from slipstream.engine import rank_main, rank_process
from slipstream.nn.decoder import Decoder
from slipstream.nn.spec import DecoderSpec
from slipstream.worker import worker
from slipstream.worker.hardware import Hardware

PERIOD_S = 0.3


def start_of(number: int, seconds: float, notes: bool, first: int = 0) -> str:
    """The code of rank_processes._START, by which the rank of this number needs so long for its loads from that of this
    index on: 0 is the load, 1 the first wake at level 2. notes: whether it says that it goes on."""
    code = f"from slow_loader import main; main({number}, {seconds}, {notes}, {first})"
    return f"import sys; sys.path[:] = {{path!r}}; {code}"


def patch(number: int, seconds: float, notes: bool, first: int) -> None:
    load, num_loads = worker.load_target, [0]

    def slowly(config: EngineConfig, spec: DecoderSpec, hardware: Hardware, phases: StartUp) -> Decoder:
        num_loads[0] += 1
        if hardware.parallel.number == number and num_loads[0] > first:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                threading.Event().wait(PERIOD_S)
                if notes:
                    hardware.parallel.note("a part")
        return load(config, spec, hardware, phases)

    worker.load_target = slowly  # type: ignore[attr-defined]


def never_connects(number: int) -> None:
    """The process of a rank of this number says hello, and no more."""
    join = rank_process.join

    def stuck(store: dist.Store, own: Hardware, *others: Any) -> Hardware:
        if own.parallel.number == number:
            threading.Event().wait()
        return join(store, own, *others)

    rank_process.join = stuck  # type: ignore[assignment]
    rank_main.main()


def main(number: int, seconds: float, notes: bool, first: int) -> None:
    patch(number, seconds, notes, first)
    rank_main.main()
