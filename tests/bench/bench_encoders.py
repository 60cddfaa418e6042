"""Texts per second of an encoder, batched against one by one: every runtime and device of this machine.

    python tests/bench/bench_encoders.py                                # random weights in MiniLM-L6's shape
    python tests/bench/bench_encoders.py --model FOLDER_OR_ID --batches 1,32 --tokens 20-60,256

Throughput does not depend on what the weights are, so random ones do; texts are words of the vocabulary, a token each.
`run` is the runtime alone on token ids (host to host, copies included), `embed` also the tokenizer: what an instance
of Triton's model does per batch. One row per runtime, length and batch size; x is against a batch of one.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "backend"), str(ROOT / "tests/support"), str(ROOT / "build")]

from slipstream.core.errors import ConfigError  # noqa: E402
from slipstream.encoders.checkpoint import Checkpoint, find_checkpoint, read_checkpoint  # noqa: E402
from slipstream.encoders.encoder import Encoder, padded_batch  # noqa: E402
from slipstream.encoders.open_runtime import open_runtime  # noqa: E402
from slipstream.encoders.runtime import Runtime, RuntimeSettings  # noqa: E402
from tiny_encoders import write_random_minilm  # noqa: E402


@dataclass(frozen=True)
class Lengths:
    """Tokens of a text, both ends included, the two special ones too."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}-{self.most}" if self.least != self.most else str(self.least)


@dataclass(frozen=True)
class Rate:
    """Texts per second, and what one call takes."""

    texts_per_s: float
    call_ms: float


def parse_lengths(text: str) -> Lengths:
    ends = [int(part) for part in text.split("-")]
    if len(ends) > 2 or not 3 <= ends[0] <= ends[-1]:
        raise argparse.ArgumentTypeError(f"{text!r}: accepted: such as 20-60 or 256, at least 3")
    return Lengths(ends[0], ends[-1])


def draw_texts(encoder: Encoder, count: int, lengths: Lengths, seed: int = 0) -> list[str]:
    """Texts of whole words of the vocabulary, so that a text of n words has n + 2 tokens."""
    words = [word for word in encoder._tokenizer.get_vocab() if word.isascii() and word.isalpha() and word.islower()]
    dice = np.random.default_rng(seed)
    sizes = dice.integers(lengths.least - 2, lengths.most - 1, count)
    return [" ".join(dice.choice(words, size)) for size in sizes]


def timed(call: Callable[[], object], num_texts: int, seconds: float) -> Rate:
    """The median of calls of about `seconds` in all, after two that warm up."""
    for _ in range(2):
        call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    median = float(np.median(times))
    return Rate(num_texts / median, median * 1e3)


def measure(encoder: Encoder, runtime: Runtime, batch: int, lengths: Lengths, seconds: float) -> tuple[Rate, Rate]:
    texts = draw_texts(encoder, batch, lengths)
    encoder._tokenizer.enable_truncation(encoder.checkpoint.max_tokens)
    ids = padded_batch(encoder.checkpoint, [encoding.ids for encoding in encoder._tokenizer.encode_batch(texts)])
    return (
        timed(lambda: runtime.run(ids), batch, seconds),
        timed(lambda: encoder.embed(texts), batch, seconds),
    )


def settings_of(arguments: argparse.Namespace) -> Iterator[tuple[str, RuntimeSettings]]:
    """Everything worth comparing; what this machine lacks is told when it is opened."""
    engine = arguments.engine
    for device in arguments.devices.split(","):
        dtypes = ("float16", "float32") if device == "cuda" else ("float32",)
        for dtype in dtypes:
            for graphs in ("on", "off") if device == "cuda" else ("off",):
                name = f"torch {device} {dtype}{' graphs' if graphs == 'on' else ''}"
                yield name, RuntimeSettings("torch", device, arguments.threads, None, dtype, graphs)
        if engine is not None:
            yield f"onnxruntime {device}", RuntimeSettings("onnxruntime", device, arguments.threads, engine)


def run(arguments: argparse.Namespace, checkpoint: Checkpoint) -> None:
    print("| runtime | tokens | batch | run ms | run texts/s | x | embed ms | embed texts/s | x |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    for name, settings in settings_of(arguments):
        try:
            runtime = open_runtime(settings, checkpoint)
        except ConfigError as error:
            print(f"| {name} | | | | {error} | | | | |", flush=True)
            continue
        encoder = Encoder(checkpoint, runtime)
        for lengths in arguments.tokens:
            first: tuple[Rate, Rate] | None = None
            for batch in arguments.batches:
                rates = measure(encoder, runtime, batch, lengths, arguments.seconds)
                first = first or rates
                cells = [
                    f"{r.call_ms:.3f} | {r.texts_per_s:.0f} | {r.texts_per_s / one.texts_per_s:.1f}"
                    for r, one in zip(rates, first)
                ]
                print(f"| {name} | {lengths} | {batch} | {' | '.join(cells)} |", flush=True)


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="package:NAME/FOLDER, a folder or a hub id; default: random weights")
    parser.add_argument("--batches", default="1,4,16,64,256", help="texts of one call (%(default)s)")
    parser.add_argument("--tokens", default="20-60,256", help="lengths of texts (%(default)s)")
    parser.add_argument("--devices", default=default_devices(), help="cpu, cuda or both (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each measurement (%(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as the runtime likes")
    parser.add_argument("--no-onnx", action="store_true", help="leave ONNX Runtime out: no export")
    arguments = parser.parse_args(given)
    arguments.batches = [int(size) for size in arguments.batches.split(",")]
    arguments.tokens = [parse_lengths(text) for text in arguments.tokens.split(",")]
    return arguments


def default_devices() -> str:
    import torch

    return "cuda,cpu" if torch.cuda.is_available() else "cpu"


def main(given: list[str] | None = None) -> None:
    arguments = parse_arguments(given)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if arguments.model:
            checkpoint = read_checkpoint(find_checkpoint(arguments.model, Path.cwd()))
        else:
            checkpoint = read_checkpoint(write_random_minilm(folder / "minilm"))
        arguments.engine = None
        if not arguments.no_onnx:
            from build_encoder import build_onnx

            arguments.engine = build_onnx(checkpoint, folder / "engine").parent
        run(arguments, checkpoint)


if __name__ == "__main__":
    main()
