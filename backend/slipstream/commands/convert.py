"""Write a checkpoint once in the form that is served: config.json, safetensors, tokenizer.json with the chat template.

From a GGUF file (a load of `model: /path/to/file.gguf` does the same once, into the user's cache folder), or from a
folder that has its weights pickled (`pytorch_model*.bin`; tensors alone are read, nothing of it is run) or its
tokenizer as sentencepiece's or tiktoken's file alone, as Baichuan's, ChatGLM's and GLM-4's have.

    slipstream convert SmolLM2-135M-Instruct.Q4_1.gguf /models/smollm2
    slipstream convert /downloads/Baichuan2-7B-Chat /models/baichuan2
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a .gguf file of a Llama-like or Qwen-like model, or a folder")
    parser.add_argument("output", type=Path, help="the folder to make")
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=dtypes, default="bfloat16", help="of GGUF files; a folder's is kept")


def run(arguments: argparse.Namespace) -> int:
    if arguments.source.is_dir():
        from slipstream.nn.convert.folder import convert_folder

        convert_folder(arguments.source, arguments.output)
    else:
        from slipstream.nn.gguf.convert import convert

        convert(arguments.source, arguments.output, arguments.dtype)
    print(f"{arguments.output}: written")
    return 0
