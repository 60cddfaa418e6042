"""Write a GGUF file as a checkpoint folder: config.json, safetensors, tokenizer.json with the chat template.

A load of `model: /path/to/file.gguf` does the same once, into the user's cache folder.

    slipstream convert SmolLM2-135M-Instruct.Q4_1.gguf /models/smollm2
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a .gguf file of a Llama-like or Qwen-like model")
    parser.add_argument("output", type=Path, help="the folder to make")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")


def run(arguments: argparse.Namespace) -> int:
    from slipstream.nn.gguf.convert import convert

    convert(arguments.file, arguments.output, arguments.dtype)
    print(f"{arguments.output}: written")
    return 0
