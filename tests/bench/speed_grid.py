"""The grid of decode speeds beside vLLM that docs/perf.md opens with, as data. Standard library only.

GPUs take the entries from the top: first the longest, last what can be left out when time is over.
"""

from __future__ import annotations

from typing import NamedTuple

OPTIONS = (
    *("--measure", "decode", "--prefix-caching", "--most-tokens", "800000", "--max-model-len", "8448"),
    *("--decode-short", "4", "--decode-long", "68", "--decode-repeats", "2"),
)
# Contexts ascend and batches descend: shorter prompts begin longer ones, and smaller batches are parts of larger. A
# token more than whole blocks: of a prompt that is cached one token is computed, not a block of up to 64.
CONTEXTS = (1025, 3009, 8193)
BATCHES = (256, 200, 128, 64, 48, 8, 1)
DRAWN = 1.0  # temperature of models with experts, whose equal tokens would all choose the same


class Entry(NamedTuple):
    """format: a name of compare.py, which also says what vLLM runs beside it. timeout_s: for each engine."""

    shape: str
    format: str
    contexts: tuple[int, ...] = CONTEXTS
    batches: tuple[int, ...] = BATCHES
    temperature: float = 0.0
    timeout_s: float = 240.0

    @property
    def options(self) -> tuple[str, ...]:
        """Of both engines' programs."""
        contexts, batches = (",".join(map(str, numbers)) for numbers in (self.contexts, self.batches))
        temperature = ("--temperature", f"{self.temperature:g}")
        return (*OPTIONS, "--contexts", contexts, "--batches", batches, *temperature)


ENTRIES = (
    Entry("llama3-70b", "fp8", timeout_s=330.0),
    Entry("llama3-8b", "none"),
    Entry("qwen2.5-7b", "none"),
    Entry("llama3-8b", "fp8"),
    Entry("qwen2.5-7b", "fp8"),
    Entry("llama3-8b", "wint4-fp8kv", contexts=CONTEXTS[:1], batches=(64, 48, 8, 1)),
    Entry("llama3-8b", "w4a8_fp8"),
    Entry("qwen2.5-7b", "w4a8_fp8"),
    Entry("mixtral-8x7b", "fp8", temperature=DRAWN),
    Entry("qwen3-30b-a3b", "none", temperature=DRAWN),
    Entry("qwen3-30b-a3b", "fp8", temperature=DRAWN),
    Entry("baichuan2-13b", "none"),
    Entry("baichuan2-13b", "fp8"),
    Entry("mixtral-8x7b", "none", temperature=DRAWN),
)
