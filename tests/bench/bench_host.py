"""The host's time of a decode step, without a device: CPU time of the engine's thread from schedule to the read tokens.

    .venv/bin/python tests/bench/bench_host.py --batches 1,8,64,200
    .venv/bin/python tests/bench/bench_host.py --batches 200 --profile
    .venv/bin/python tests/bench/bench_host.py --changing --temperature 0.8
    .venv/bin/python tests/bench/bench_host.py --batches 1,8,64 --drafts ngram

--changing: requests of 1 to 128 tokens after prompts of 16 instead, each replaced when it ends, so that about a 64th of
them join and leave in each step; the median of the rounds, prompts included.

--drafts: of each request five drafts are verified and accepted in each step. ngram: looked up behind the step before,
which is read first. head: made on the device, as MTP modules and EAGLE heads do, so that the next verification is
launched before the step is read.

The real scheduler, worker, batch and sampler run with overlapped scheduling, as on a GPU, and a step's arrays are
written as a CUDA graph's inputs are; the model itself returns constants. Not in it: launches of kernels, copies to and
from the device, the output thread. Greedy requests of 1,000 tokens of prompt; their logits are a few columns wide,
because a draw, which a CPU would do on this thread, is the device's work. Decodes take what their graph drew; sampled
requests in a step with prompts are drawn on this thread, 150 us or more.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import logging
import pstats
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/bench"))

from measures import add_settings, numbers  # noqa: E402
from slipstream.core.config_parse import config_from_values  # noqa: E402
from slipstream.core.request import Request  # noqa: E402
from slipstream.core.sampling_params import SamplingParams  # noqa: E402
from slipstream.engine.engine import Engine  # noqa: E402
from slipstream.nn.batch import ForwardBatch  # noqa: E402
from slipstream.worker.cuda_graphs import StepGraphs  # noqa: E402
from slipstream.worker.graph_shapes import GraphShape, graph_shapes  # noqa: E402
from slipstream.worker.interface import DraftBudget, DraftTokens  # noqa: E402
from slipstream.worker.launched_step import ComputedRows  # noqa: E402
from slipstream.worker.spec_decode.draft_graphs import GraphedHead  # noqa: E402
from slipstream.worker.spec_decode.interface import (  # noqa: E402
    PROPOSERS,
    SpeculatorContext,
)
from slipstream.worker.spec_decode.planning import DraftMemory, Planning  # noqa: E402
from slipstream.worker.static_tensors import GraphInputs  # noqa: E402
from slipstream_kernels import ops  # noqa: E402

PROMPT, WIDTH, VOCABULARY, NUM_LOGITS = 1000, 64, 2048, 4
NUM_DRAFTS = 5
MAX_BATCH = 1000  # each request of `decode` has a token of its own
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": WIDTH,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64,
    "vocab_size": VOCABULARY, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "torch_dtype": "float32", "tie_word_embeddings": True,
}  # fmt: skip


class _NoGraphs(StepGraphs[GraphShape]):
    """Inputs are written as for CUDA graphs; a replay gives zeros, which each shape has its own view of, as a graph has
    its output."""

    def __init__(self, shapes: Sequence[GraphShape], inputs: GraphInputs) -> None:
        super().__init__(shapes, inputs, _no_model)
        hidden = torch.zeros(max(shape.num_tokens for shape in shapes), WIDTH)
        self._graphs: dict[GraphShape, Any] = {shape: (None, hidden[: shape.num_tokens]) for shape in shapes}

    def replay(self, shape: GraphShape) -> torch.Tensor:
        return self._graphs[shape][1]


class _Head(GraphedHead):
    """Drafts the token that the model says, in no time."""

    drafts_trees = False
    num_drafts = num_levels = NUM_DRAFTS

    def __init__(self, context: SpeculatorContext) -> None:
        super().__init__()
        self._tokens = torch.ones(context.config.scheduler.max_num_seqs, NUM_DRAFTS, dtype=torch.int64)

    @staticmethod
    def planned(planning: Planning) -> DraftMemory:
        return DraftMemory()

    def _draft(self, rows: ComputedRows) -> torch.Tensor:
        return self._tokens[: len(rows.last)]

    def drafts(self, wanted: DraftBudget, tokens: list[int]) -> DraftTokens:
        return DraftTokens(tokens[: min(wanted.num_drafts, wanted.depth)])

    def rows_of(self, tokens: torch.Tensor, num_drafts: int) -> ops.DraftRows:
        return ops.DraftRows(tokens[:, :num_drafts])


DRAFTERS = {"ngram": PROPOSERS.get("ngram"), "head": _Head}  # by the option's value


def _accept_all(rows: ops.VerifiedRows, out: ops.AcceptedRows | None = None) -> ops.AcceptedRows:
    """Instead of the kernel: every draft."""
    assert out is not None
    torch.sub(2 << rows.num_drafts.long(), 1, out=out.paths)
    torch.sub(rows.query_start_loc[1:].long(), 1, out=out.last)
    return out


class HostBench:
    """An engine whose model takes no time. drafts: of DRAFTERS, or none."""

    def __init__(self, max_num_seqs: int, temperature: float = 0.0, drafts: str = "", **settings: object) -> None:
        if drafts:  # instead of the method whose name it takes
            PROPOSERS._entries["ngram"] = DRAFTERS[drafts]
            settings = {"speculative_method": "ngram", "speculation_throttle": "off", **settings}
            ops.accept_drafts, ops.update_step_inputs = _accept_all, _ignore
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
            values = {
                "model": folder, "tokenizer": str(ROOT / "models/slipstream-demo-code"), "load_format": "dummy",
                "device": "cpu", "num_threads": 1, "max_model_len": 4096,
                "max_num_seqs": max_num_seqs, "max_num_batched_tokens": 8192, "num_blocks": max_num_seqs * 257,
                "block_size": 16, "overlap_scheduling": "on", **settings,
            }  # fmt: skip
            self.engine = Engine(config_from_values(values))
        runner: Any = self.engine.worker.runner  # type: ignore[attr-defined]
        model = runner.model
        sizes = sorted({1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs})
        shapes = graph_shapes(sizes)
        if drafts:
            shapes = [shape for shape in shapes if shape.max_query_len == 1]
            shapes += [GraphShape(size * (1 + NUM_DRAFTS), 1 + NUM_DRAFTS, size) for size in sizes]
        num_rows = max(shape.num_tokens for shape in shapes)
        runner._verifier._next_ids = torch.zeros(num_rows, dtype=torch.int64)
        logits = torch.zeros(num_rows, NUM_LOGITS)
        logits[:, 1] = 1.0
        first = [logits[:count] for count in range(num_rows + 1)]
        model.forward = lambda batch, _: _zeros(len(batch.token_ids))
        model.forward_last = lambda batch, _: _zeros(len(batch.logits_indices))
        model.final = lambda hidden: hidden
        model.lm_head = lambda hidden: first[hidden.shape[0]]
        self._temperature = temperature
        drawn = torch.ones(sizes[-1], dtype=torch.int64)
        runner._drawn.token_ids = drawn
        inputs = GraphInputs(runner._builder.max_blocks, 4096, torch.device("cpu"), drawn=drawn)
        runner._graphs = _NoGraphs(shapes, inputs)
        for size in sizes:
            runner._graphs._logits[GraphShape(size, 1, size)] = logits[:size]

    def decode(
        self, batch: int, num_steps: int = 10, repeats: int = 40, profiler: cProfile.Profile | None = None
    ) -> float:
        """Microseconds of a step of `batch` requests: the least of several rounds, since the machine has other work."""
        params = SamplingParams(max_tokens=3000, temperature=self._temperature, ignore_eos=True)
        requests = [self.engine.submit(Request([5 + number] * PROMPT, params))[0] for number in range(batch)]
        while min(request.num_output_tokens for request in requests) < 4:
            assert self.engine.error is None
            self.engine.step()
        times = []
        for _ in range(repeats):
            start = time.thread_time()
            if profiler is not None:
                profiler.enable()
            for _ in range(num_steps):
                self.engine.step()
            if profiler is not None:
                profiler.disable()
            times.append((time.thread_time() - start) / num_steps)
        assert self.engine.error is None
        assert all(request.num_output_tokens > num_steps and not request.is_finished for request in requests)
        for request in requests:
            self.engine.cancel(request.handle)
        while self.engine.has_work:
            self.engine.step()
        return min(times) * 1e6

    def decode_changing(
        self, batch: int, num_steps: int = 64, repeats: int = 12, profiler: cProfile.Profile | None = None
    ) -> float:
        """The same while requests end and others take their places; the median of the rounds."""
        lengths = cycle(1 + number * 53 % 128 for number in range(128))
        prompts = cycle(range(5, 133))

        def add() -> None:
            params = SamplingParams(max_tokens=next(lengths), temperature=self._temperature, ignore_eos=True)
            self.engine.submit(Request([next(prompts)] * 16, params))

        for _ in range(batch):
            add()
        times = []
        for _ in range(repeats):
            taken = 0.0
            for _ in range(num_steps):
                start = time.thread_time()
                if profiler is not None:
                    profiler.enable()
                outputs = self.engine.step()
                if profiler is not None:
                    profiler.disable()
                taken += time.thread_time() - start
                for _ in range(sum(output.finish_reason is not None for output in outputs)):
                    add()
            times.append(taken / num_steps)
        assert self.engine.error is None
        for request in list(self.engine.scheduler.live_requests):
            self.engine.cancel(request.handle)
        while self.engine.has_work:
            self.engine.step()
        return median(times[1:]) * 1e6


def _zeros(rows: int) -> torch.Tensor:
    return torch.zeros(rows, WIDTH)


def _ignore(*arguments: object) -> None:
    """Instead of a kernel whose results nobody reads."""


def _no_model(batch: ForwardBatch) -> torch.Tensor:
    raise AssertionError("nothing is captured")


def batches(text: str) -> list[int]:
    """The option's type. Raises ArgumentTypeError."""
    found = numbers(text)
    if not found or not all(1 <= batch <= MAX_BATCH for batch in found):
        raise argparse.ArgumentTypeError(f"{text!r}, accepted: numbers from 1 to {MAX_BATCH}, with commas")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=batches, default=[1, 8, 64, 200])
    parser.add_argument("--profile", action="store_true", help="and where the time of the last batch goes")
    parser.add_argument("--changing", action="store_true", help="requests end, and others take their places")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--drafts", choices=tuple(DRAFTERS), default="", help="verify five of each request")
    add_settings(parser)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    bench = HostBench(
        max(arguments.batches),
        arguments.temperature,
        arguments.drafts,
        **dict(pair.split("=", 1) for pair in arguments.set),
    )
    measure = bench.decode_changing if arguments.changing else bench.decode
    for batch in arguments.batches:
        with torch.inference_mode():  # as the engine's thread
            step_us = measure(batch)
        print(
            json.dumps({"batch": batch, "step_us": round(step_us), "request_us": round(step_us / batch, 2)}), flush=True
        )
    if arguments.profile:
        profiler = cProfile.Profile()
        with torch.inference_mode():
            measure(arguments.batches[-1], profiler=profiler)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()
