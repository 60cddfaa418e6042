"""Prefix hits and balance of a model with several engines, on a multi-turn load: real server, real engines, null model.

    python tests/bench/bench_replicas.py [--replicas 1 4] [--slack 0 4 16] [--conversations 96] [--concurrency 32]

Each conversation has a system prompt (one for all) and turns; a turn's prompt is all before it, the answers included.
`--concurrency` conversations are under way at any time and send their next turn at once. The null model computes
nothing, so the figures are where requests went and what they found, never how fast.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/bench")]

from bench_backend import MissingTool  # noqa: E402
from llm_client import http_generate  # noqa: E402
from llm_server import backends_dir, missing_server, parameter  # noqa: E402
from triton_server import TritonServer  # noqa: E402

CHECKPOINT = ROOT / "models/slipstream-demo-code"
BLOCK_SIZE = 64
VOCABULARY = 300  # any ids that the model has


@dataclass(frozen=True)
class Load:
    """Tokens of the system prompt, of a user's turn (from, to) and of an answer."""

    conversations: int = 96
    concurrency: int = 32
    turns: int = 6
    system: int = 256
    user: tuple[int, int] = (32, 256)
    answer: int = 48
    seed: int = 0


@dataclass(frozen=True)
class Found:
    """hit_rate: of the prompt tokens. computed_by_replica: those that were not cached; made_by_replica: new tokens."""

    hit_rate: float
    computed_by_replica: tuple[float, ...]
    made_by_replica: tuple[float, ...]


@contextmanager
def serving(num_replicas: int, slack: int, num_blocks: int) -> Iterator[TritonServer]:
    """The null model as `llm`. Raises MissingTool."""
    backends = backends_dir()
    if backends is None or missing_server():
        raise MissingTool(missing_server())
    parameters = {"model": CHECKPOINT, "load_format": "null", "block_size": BLOCK_SIZE, "num_blocks": num_blocks}
    parameters |= {"replica_load_slack": slack, "num_threads": 1}
    text = 'backend: "slipstream"\n' + "".join(parameter(key, value) for key, value in parameters.items())
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "llm/1").mkdir(parents=True)
        group = f"instance_group {{ count: {num_replicas} kind: KIND_CPU }}\n"
        (Path(name) / "llm/config.pbtxt").write_text(text + group)
        with TritonServer(name, backends) as server:
            yield server


def converse(server: TritonServer, load: Load, system: Sequence[int], seed: int) -> None:
    dice = random.Random(seed)
    prompt = list(system)
    for _ in range(load.turns):
        prompt += [dice.randrange(VOCABULARY) for _ in range(dice.randint(*load.user))]
        asked = {"max_tokens": load.answer, "ignore_eos": True, "temperature": 0, "return_output_ids": True}
        status, reply = http_generate(
            server.http_url, "llm", {"input_ids": prompt, "exclude_input_in_output": True, **asked}
        )
        assert status == 200, reply
        prompt += reply["output_ids"]


def of_each(server: TritonServer, family: str) -> dict[str, float]:
    """The metric of each replica, by its label; "" if there is only one."""
    found = {}
    for name, value in server.metrics().items():
        if name.startswith(family + "{"):
            found[name.partition('replica="')[2].partition('"')[0]] = value
    return found


def measure(load: Load, num_replicas: int, slack: int, num_blocks: int) -> Found:
    dice = random.Random(load.seed)
    system = [dice.randrange(VOCABULARY) for _ in range(load.system)]
    made_in_all = load.conversations * load.turns * load.answer
    with serving(num_replicas, slack, num_blocks) as server:
        with ThreadPoolExecutor(load.concurrency) as pool:
            seeds = range(load.seed + 1, load.seed + 1 + load.conversations)
            list(pool.map(lambda seed: converse(server, load, system, seed), seeds))
        made = "slipstream_generation_tokens_total"
        server.wait_until(lambda: sum(of_each(server, made).values()) == made_in_all, "the metrics")
        queries = of_each(server, "slipstream_prefix_cache_queries_tokens_total")
        hits = of_each(server, "slipstream_prefix_cache_hits_tokens_total")
        computed = tuple(queries[replica] - hits[replica] for replica in sorted(queries))
        made_by_replica = tuple(value for _, value in sorted(of_each(server, made).items()))
    return Found(sum(hits.values()) / sum(queries.values()), computed, made_by_replica)


def imbalance(figures: Sequence[float]) -> float:
    """The most loaded replica's over the mean."""
    return max(figures) * len(figures) / sum(figures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--slack", type=int, nargs="+", default=[0, 4, 16])
    parser.add_argument("--conversations", type=int, default=Load.conversations)
    parser.add_argument("--concurrency", type=int, default=Load.concurrency)
    parser.add_argument("--num-blocks", type=int, default=4096, help="of each engine")
    arguments = parser.parse_args()
    load = Load(arguments.conversations, arguments.concurrency)
    columns = ("replicas", "slack", "hit rate", "of the first", "computed, max/mean", "made, max/mean")
    rows: list[tuple[str, ...]] = []
    first = 0.0
    for num_replicas in arguments.replicas:
        for slack in arguments.slack if num_replicas > 1 else [0]:
            found = measure(load, num_replicas, slack, arguments.num_blocks)
            first = first or found.hit_rate
            shares = (imbalance(found.computed_by_replica), imbalance(found.made_by_replica))
            figures = (found.hit_rate, found.hit_rate / first, *shares)
            rows.append((str(num_replicas), str(slack), *(f"{figure:.3f}" for figure in figures)))
    print("| " + " | ".join(columns) + " |\n|" + "--:|" * len(columns))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
