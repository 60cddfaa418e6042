"""A checkpoint of several files, quantised as it is loaded, its head too: the host holds one of the files at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from slipstream.core.config import ModelConfig
from slipstream.nn.load import load_model
from slipstream.nn.models.family import LLAMA_NAMES

SLACK_BYTES = 96 << 20  # temporaries of the largest layer, and what the allocator keeps of them
FIELDS = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 8}
# In a process of its own, whose high-water mark is the load's: mapped files count as well.
WATCHED_LOAD = """
import sys, torch
from slipstream.core.config import ModelConfig
from slipstream.nn.load import load_model

def bytes_of(field):
    return int(open("/proc/self/status").read().split(field)[1].split()[0]) * 1024

config = ModelConfig(
    model=sys.argv[1], device="cpu", dtype="bfloat16", quantization="wint8", quantize_lm_head=True
)
torch.zeros(4, 4) @ torch.zeros(4, 4)
open("/proc/self/clear_refs", "w").write("5")  # the mark starts from here
before = bytes_of("VmRSS:")
decoder = load_model(config)
linears = [decoder.lm_head, *(linear for layer in decoder.layers for linear in layer.linears())]
held = sum(tensor.nbytes for linear in linears for tensor in linear.weights.values())
held += decoder.embedding.weight.nbytes
print(bytes_of("VmHWM:") - before, held)
"""


def test_the_host_holds_one_shard(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8192, "max_position_embeddings": 64, **FIELDS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    slots = load_model(ModelConfig(model=str(tmp_path), device="cpu", load_format="dummy")).weight_slots(LLAMA_NAMES)
    weight_map = {}
    for layer in range(6):
        file = f"model-{layer + 1:05d}-of-00006.safetensors"
        names = [name for name in slots if f"layers.{layer}." in name or (layer == 0 and ".layers." not in name)]
        save_file({name: torch.full(slots[name].shape, 0.01, dtype=torch.bfloat16) for name in names}, tmp_path / file)
        weight_map |= dict.fromkeys(names, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    command = [sys.executable, "-c", WATCHED_LOAD, str(tmp_path)]
    # a fixed threshold: else the allocator comes to keep freed tensors, some more in some runs
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=400, env=environment)
    peak, held = map(int, done.stdout.split())
    assert held < peak < held + max(sizes) + SLACK_BYTES < held + sum(sizes)
