"""build/quantize.py on tiny checkpoints: few windows of a packed text."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build"))
import quantize

NUM_TOKENS, WINDOW_TOKENS = 256, 64


def quantise(full: Path, text: Path, output: Path, *arguments: str, num_tokens: int = NUM_TOKENS) -> Path:
    """The output folder. arguments: more of the command line. num_tokens: that are computed."""
    common = ["--model", str(full), "--output", str(output), "--device", "cpu", "--num-tokens", str(num_tokens)]
    sizes = ["--text", str(text), "--window-tokens", str(WINDOW_TOKENS)]
    quantize.quantize(quantize.parse_arguments([*common, *sizes, *arguments]))
    return output
