"""Tokens per second on a CPU: formats of this engine, and llama.cpp on the GGUF file of the same weights.

    python build/chat_model.py                                     # SmolLM2-135M-Instruct
    python tests/bench/bench_cpu.py --threads 1,2 --requests 1,8
    python tests/bench/bench_cpu.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --llama-python other/bin/python

Each measurement is a process of its own, and formats take turns for --rounds rounds: on a machine with other work the
best round says most.  A figure is the median time of a decode step (greedy, 32 tokens of context) of the best round.
--gguf needs llama-cpp-python in the Python that --llama-python names.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHAT_MODEL = ROOT / "install/models/SmolLM2-135M-Instruct"
BF16, HEAD_TOO = {"dtype": "bfloat16"}, {"quantize_lm_head": True}
FORMATS: dict[str, dict[str, object]] = {
    "fp32": {},
    "bf16": BF16,
    "wint8": {"quantization": "wint8", **HEAD_TOO},
    "wint8, bf16": {"quantization": "wint8", **HEAD_TOO, **BF16},
    "w8a8_int8": {"quantization": "w8a8_int8", **HEAD_TOO},
    "wint4, bf16": {"quantization": "wint4", "quantization_group_size": 64, **HEAD_TOO, **BF16},
    "fp8": {"quantization": "fp8", **HEAD_TOO},
}
LLAMA = "llama.cpp"
CONTEXT = 32
TIMEOUT_S = 600


def clock_of(num_threads: int) -> Callable[[], float]:
    """One thread is timed by its own CPU time, which other processes lengthen least; several by the wall clock."""
    return time.thread_time if num_threads == 1 else time.perf_counter


def prompts(count: int) -> list[list[int]]:
    dice = random.Random(7)
    return [[dice.randrange(10, 30000) for _ in range(CONTEXT)] for _ in range(count)]


def engine_step_ms(model: str, name: str, num_requests: int, num_steps: int, num_threads: int) -> float:
    from slipstream.core.config_parse import config_from_values
    from slipstream.core.request import Request
    from slipstream.core.sampling_params import SamplingParams
    from slipstream.engine.engine import Engine

    values = {"model": model, "device": "cpu", "num_blocks": 64, "max_model_len": 1024, **FORMATS[name]}
    values["num_threads"] = num_threads
    engine = Engine(config_from_values(values))
    params = SamplingParams(max_tokens=num_steps + 2, temperature=0.0, ignore_eos=True)
    for prompt in prompts(num_requests):
        engine.submit(Request(prompt, params))
    clock, times = clock_of(num_threads), []
    while engine.has_work:
        start = clock()
        engine.step()
        times.append(clock() - start)
    engine.close()
    return statistics.median(times[2:-1]) * 1e3


def llama_step_ms(gguf: str, num_requests: int, num_steps: int, num_threads: int) -> float:
    """Decoding all requests in one batch, greedily; the same number of logits is read."""
    import llama_cpp as ll
    import numpy as np

    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(gguf.encode(), ll.llama_model_default_params())
    params = ll.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_seq_max = 1024 * num_requests, 1024, num_requests
    params.n_threads = params.n_threads_batch = num_threads
    context = ll.llama_init_from_model(model, params)
    vocab_size = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    batch = ll.llama_batch_init(CONTEXT * num_requests, 0, 1)

    def decode(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """rows: token, position, sequence, whether its logits are wanted."""
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, position, 1
            batch.seq_id[index][0], batch.logits[index] = sequence, wanted
        if ll.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        chosen = [ll.llama_get_logits_ith(context, index) for index, row in enumerate(rows) if row[3]]
        return [int(np.ctypeslib.as_array(logits, (vocab_size,)).argmax()) for logits in chosen]

    first = [
        (token, position, sequence, position == CONTEXT - 1)
        for sequence, prompt in enumerate(prompts(num_requests))
        for position, token in enumerate(prompt)
    ]
    clock = clock_of(num_threads)
    tokens, times = decode(first), []
    for step in range(num_steps):
        start = clock()
        tokens = decode([(token, CONTEXT + step, sequence, True) for sequence, token in enumerate(tokens)])
        times.append(clock() - start)
    return statistics.median(times[1:]) * 1e3


def measured(arguments: argparse.Namespace, name: str, num_requests: int, num_threads: int) -> float:
    """In a process of its own, whose OpenMP has so many threads."""
    python = arguments.llama_python if name == LLAMA else sys.executable
    asked = ["--one", json.dumps([name, num_requests, num_threads]), "--steps", str(arguments.steps)]
    sources = ["--model", arguments.model, "--gguf", arguments.gguf]
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    done = subprocess.run(
        [python, __file__, *asked, *sources], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def one(arguments: argparse.Namespace) -> None:
    name, num_requests, num_threads = json.loads(arguments.one)
    if name == LLAMA:
        print(llama_step_ms(arguments.gguf, num_requests, arguments.steps, num_threads))
    else:
        print(engine_step_ms(arguments.model, name, num_requests, arguments.steps, num_threads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(CHAT_MODEL), help="the checkpoint's folder")
    parser.add_argument("--gguf", default="", help="the file for llama.cpp; empty: it is not measured")
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--formats", default=";".join(FORMATS), help=f"of {'; '.join(FORMATS)}; divided by semicolons")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--requests", default="1,8")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return one(arguments)
    names = [*arguments.formats.split(";"), *[LLAMA] * bool(arguments.gguf)]
    best: dict[tuple[str, int, int], float] = {}
    for _ in range(arguments.rounds):
        for threads in map(int, arguments.threads.split(",")):
            for requests in map(int, arguments.requests.split(",")):
                for name in names:
                    key = name, requests, threads
                    best[key] = min(best.get(key, float("inf")), measured(arguments, name, requests, threads))
    print("| format | requests | threads | ms a step | tokens/s |\n| --- | --: | --: | --: | --: |")
    for (name, requests, threads), step_ms in best.items():
        print(f"| {name} | {requests} | {threads} | {step_ms:.1f} | {requests / step_ms * 1e3:.1f} |")


if __name__ == "__main__":
    main()
