"""The models of a run, one after the other: every way to draft, in pools that are too small for what is asked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from llm_server import ROOT

MODELS = ROOT / "models"
METHODS = {
    "plain": {},
    "ngram": {"speculative_method": "ngram"},
    "draft_model": {"speculative_method": "draft_model", "draft_model": MODELS / "slipstream-demo-draft"},
    "medusa": {"speculative_method": "medusa", "medusa_heads": MODELS / "slipstream-demo-medusa"},
    "mtp": {"speculative_method": "mtp", "mtp_module": MODELS / "slipstream-demo-mtp"},
    "eagle": {"speculative_method": "eagle", "eagle_head": MODELS / "slipstream-demo-eagle"},
}


@dataclass(frozen=True)
class Round:
    """unloads_running: the model goes while its last clients are still being answered."""

    name: str
    method: str
    parameters: dict[str, object]
    unloads_running: bool

    @property
    def has_drafts(self) -> bool:
        return self.method != "plain"


def make_rounds(seed: int) -> Iterator[Round]:
    """Without end; all methods come before one comes again."""
    rng = random.Random(f"rounds of {seed}")
    number = 0
    while True:
        for method in rng.sample(sorted(METHODS), len(METHODS)):
            number += 1
            yield Round(f"chaos_{number}_{method}", method, _parameters(rng, method), rng.random() < 0.5)


def _parameters(rng: random.Random, method: str) -> dict[str, object]:
    block_size = rng.choice((8, 16))
    caches = rng.choice(("true", "false"))
    chosen: dict[str, object] = {
        "max_model_len": 256,
        "block_size": block_size,
        "num_blocks": rng.choice((2, 3)) * 256 // block_size // 2 + 4,  # of one longest sequence, or one and a half
        "enable_prefix_caching": caches,
        "scheduler_policy": rng.choice(("max_utilization", "max_utilization", "guaranteed_no_evict")),
        "overlap_scheduling": rng.choice(("auto", "on")),
        "max_num_batched_tokens": rng.choice((64, 512)),
        "drain_timeout_s": 10,
        "stop_by_request_id": "true",
    }
    if caches == "true" and rng.random() < 0.5:
        chosen["kv_cache_host_memory_bytes"] = 16 << 20
    if method != "plain":
        chosen |= {**METHODS[method], "speculation_throttle": rng.choice(("auto", "off"))}
    return chosen
