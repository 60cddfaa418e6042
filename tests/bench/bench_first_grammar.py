"""What the first request with a grammar costs a stream beside it, and what the mask of a row costs.

    python tests/bench/bench_first_grammar.py --model models/slipstream-demo-code --device cpu --repeats 4

Each repeat is a process of its own, in which one stream runs and a request with a grammar comes after a second: the
stream's longest gaps until that request has ended. Then microseconds a masked row of 128,256 tokens, by the share of
tokens that are allowed, beside xgrammar's function.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/bench")]

from engine_driver import make_engine  # noqa: E402
from slipstream.core.request import Request  # noqa: E402
from slipstream.core.sampling_params import Guide, SamplingParams  # noqa: E402
from slipstream.worker.sample.structured_output import GrammarMasks, MaskApplier  # noqa: E402

PROMPT = [70, 201, 33]
STREAM = SamplingParams(max_tokens=1900, temperature=1.0, ignore_eos=True)
GUIDED = SamplingParams(max_tokens=40, temperature=1.0, guide=Guide("regex", "[a-z]{30}"))
QUIET_S = 1.0
VOCAB_SIZE = 128_256
NUM_ROWS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models/slipstream-demo-code")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--once", action="store_true", help="one repeat, in this process")
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(gaps(arguments.model, arguments.device)))
        return
    command = [sys.executable, __file__, "--once", "--model", str(arguments.model), "--device", arguments.device]
    for _ in range(arguments.repeats):
        print(
            subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1], flush=True
        )
    for share in (0.001, 0.25, 0.5, 0.98):
        print(json.dumps({"allowed": share, **mask_us(share, torch.device(arguments.device))}), flush=True)


def gaps(model: Path, device: str) -> dict[str, float]:
    """Milliseconds between tokens of the stream, before the request with a grammar comes and until it has ended."""
    engine = make_engine(model, model={"device": device}, cache={"block_size": 64, "num_blocks": 80})
    engine.submit(Request(list(PROMPT), STREAM))
    end = time.perf_counter() + QUIET_S
    before = _steps_ms(engine.step, lambda: time.perf_counter() > end)
    (guided,) = engine.submit(Request(list(PROMPT), GUIDED))
    during = _steps_ms(engine.step, lambda: guided.is_finished or not engine.has_work)
    engine.close()
    longest = {f"longest_{rank}": round(one, 1) for rank, one in enumerate(sorted(during, reverse=True)[:3], 1)}
    return {"median_before": round(statistics.median(before), 1), "longest_before": round(max(before), 1), **longest}


def _steps_ms(step: Callable[[], object], is_over: Callable[[], bool]) -> list[float]:
    found, last = [], time.perf_counter()
    while not is_over():
        step()
        now = time.perf_counter()
        found.append(1e3 * (now - last))
        last = now
    return found


def mask_us(share: float, device: torch.device) -> dict[str, float]:
    """Microseconds a row of NUM_ROWS masked ones, of twice as many: ours with the copy, xgrammar's call without it."""
    import xgrammar

    allowed = np.random.default_rng(0).random((2 * NUM_ROWS, VOCAB_SIZE)) < share
    bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    logits, on_device = torch.randn(2 * NUM_ROWS, VOCAB_SIZE, device=device), torch.from_numpy(bits).to(device)
    rows = list(range(0, 2 * NUM_ROWS, 2))
    masks, applier = GrammarMasks(rows, np.ascontiguousarray(bits[rows])), MaskApplier(VOCAB_SIZE, device)
    calls = {
        "ours": lambda: applier.apply(logits, masks),
        "xgrammar": lambda: xgrammar.apply_token_bitmask_inplace(
            logits, on_device, vocab_size=VOCAB_SIZE, indices=rows
        ),
    }
    found = {}
    for name, call in calls.items():
        times = []
        for _ in range(100):
            begin = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(1e6 * (time.perf_counter() - begin) / NUM_ROWS)
        found[name] = round(statistics.median(times), 1)
    return found


if __name__ == "__main__":
    main()
