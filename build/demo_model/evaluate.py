"""Measure an exported checkpoint with transformers: held-out loss and a few completions."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_model.pack import load_packed

PROMPTS = (
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "import os\n\n\ndef list_python_files(directory):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
)


@torch.inference_mode()
def held_out_loss(model_dir: Path, packed_dir: Path, window_tokens: int, num_windows: int) -> tuple[float, float]:
    """(nats per token, bits per byte) over `num_windows` held-out windows, spread evenly; float32 on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    ids, num_bytes = load_packed(packed_dir, "held_out")
    last = len(ids) - window_tokens - 1
    starts = [last * i // max(1, num_windows - 1) for i in range(num_windows)]
    total = 0.0
    for start in tqdm(starts, desc="held out", unit="window"):
        window = torch.tensor(ids[start : start + window_tokens + 1].astype("int64"))
        logits = model(window[None, :-1]).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, window[1:]))
    loss = total / len(starts)
    return loss, loss / math.log(2) * len(ids) / num_bytes


@torch.inference_mode()
def complete(model_dir: Path, prompts: tuple[str, ...], max_tokens: int) -> list[str]:
    """Greedy completions, each with its prompt in front."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    texts = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        texts.append(tokenizer.decode(output[0], skip_special_tokens=True))
    return texts
