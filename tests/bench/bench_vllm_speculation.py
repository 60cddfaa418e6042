"""vLLM's n-gram and EAGLE-3 speculation with the profiles of bench_speculation: the rival's half. Needs vLLM installed.

    python tests/bench/bench_vllm_speculation.py --shape llama3-8b --method eagle --concurrency 1 4 16 64

Weights are random and acceptance is vLLM's own synthetic one (rejection_sample_method), at the rates of PROFILES by
position. What is alike: shapes, lengths, greedy decoding, rates, five drafts. What is not: vLLM drafts chains, so its
EAGLE is to be set against ours with eagle_top_k=1 as well as against the tree; and its n-gram only drafts where it
finds something, so all logits but those of a few hundred tokens are zero, and every one of them stands in the prompt.
tok/s is the difference of two runs that differ in their output length alone. --lock: a file that several such processes
share, so that they may start at once and measure one after the other.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import sys
import tempfile
import time
from contextlib import contextmanager
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from bench_vllm import ENVIRONMENT  # noqa: E402
from profiles import PROFILES  # noqa: E402
from shapes import SHAPES  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_DRAFTS = 5
NUM_TOKENS = 256  # different ones, in prompts and answers
SIZES = (1, 2, 4, 8, 16, 32, 64)  # of graphs, in requests that draft (a token each) and that verify
SHORT = 32  # tokens of the run that is subtracted


def speculative_config(method: str, shape: str, folder: Path) -> dict[str, Any] | None:
    """vLLM's, for a method of ours; None: plain decoding."""
    if method == "plain":
        return None
    rates = [ranks[0] for ranks in PROFILES[method][:NUM_DRAFTS]]
    common = {
        "num_speculative_tokens": NUM_DRAFTS,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": list(accumulate(rates, mul)),  # of the whole way to each position
    }
    if method == "ngram":
        return {**common, "method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    config = SHAPES[shape].config()
    head = {**config, "num_hidden_layers": 1, "draft_vocab_size": SHAPES[shape].vocab // 4}
    (folder / "eagle3").mkdir()
    (folder / "eagle3" / "config.json").write_text(json.dumps(head))
    return {**common, "method": "eagle3", "model": str(folder / "eagle3")}


def make_llm(arguments: argparse.Namespace, folder: Path) -> Any:
    from vllm import LLM

    (folder / "config.json").write_text(json.dumps(SHAPES[arguments.shape].config()))
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=arguments.input_len + arguments.output_len + 64,
        max_num_seqs=max(arguments.concurrency),
        gpu_memory_utilization=0.4,
        kv_cache_memory_bytes=arguments.kv_cache_gib << 30,  # two processes may share the GPU
        enable_prefix_caching=False,
        generation_config="vllm",
        seed=0,
        disable_log_stats=True,
        worker_extension_cls="vllm_narrow.Narrow",
        attention_config={"backend": "FLASH_ATTN"},
        compilation_config={
            "cudagraph_capture_sizes": sorted({rows * n for rows in (1, 1 + NUM_DRAFTS) for n in SIZES})
        },
        speculative_config=speculative_config(arguments.method, arguments.shape, folder),
    )


def timed(llm: Any, count: int, input_len: int, num_output: int) -> float:
    from vllm import SamplingParams

    dice = random.Random(count)
    prompts = [[dice.randrange(NUM_TOKENS) for _ in range(input_len)] for _ in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    elapsed = time.perf_counter() - start
    assert all(len(output.outputs[0].token_ids) == num_output for output in outputs)
    return elapsed


@contextmanager
def turn(path: Path | None) -> Iterator[None]:
    """Measure alone among the processes that share the file."""
    if path is None:
        yield
        return
    file: IO[str]
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama3-8b")
    parser.add_argument("--method", choices=("plain", "ngram", "eagle"), required=True)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--kv-cache-gib", type=int, default=14)
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # its engine process imports vllm_narrow
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        llm = make_llm(arguments, Path(folder))
        llm.collective_rpc("narrow", args=(NUM_TOKENS,))
        with turn(arguments.lock):
            for count in arguments.concurrency:
                timed(llm, count, arguments.input_len, SHORT)  # warm
                lengths = (arguments.output_len, SHORT)
                long, short = (
                    min(timed(llm, count, arguments.input_len, length) for _ in range(arguments.repeats))
                    for length in lengths
                )
                made = count * (arguments.output_len - SHORT)
                record = {"engine": "vllm", "method": arguments.method, "concurrency": count}
                print(json.dumps({**record, "tok_s": round(made / (long - short), 1)}), flush=True)
                if arguments.out:
                    with arguments.out.open("a") as file:
                        file.write(json.dumps({**record, "tok_s": round(made / (long - short), 1)}) + "\n")


if __name__ == "__main__":
    main()
