"""PEFT folders with random adapters for a checkpoint, the checkpoint with one merged, engines that serve them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from engine_driver import GREEDY, make_engine
from safetensors.torch import load_file, save_file
from slipstream.core.adapters import Matrix, SentAdapter
from slipstream.core.config import ParallelConfig
from slipstream.core.request import Request
from slipstream.engine.engine import Engine

MODULE_IDS = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "up_proj": 7, "down_proj": 6}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]


def serving(
    checkpoint: Path,
    adapters: Mapping[str, Path],
    parallel: ParallelConfig | None = None,
    cache: dict[str, object] | None = None,
    **settings: object,
) -> Engine:
    modules = json.dumps({name: str(folder) for name, folder in adapters.items()})
    model = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 6, "lora_modules": modules, **settings}
    return make_engine(checkpoint, model, cache, parallel=parallel)


def answers(engine: Engine, asked: Sequence[tuple[str, list[int]]], **params: object) -> list[list[int]]:
    """The tokens of each of the requests, which run together."""
    told = {}
    for name, prompt in asked:
        request = Request(prompt, replace(GREEDY, **params), adapter_name=name)
        told[engine.submit(request)[0].sequence_id] = []
    while engine.has_work:
        for output in engine.step():
            assert not output.error, output.error
            told[output.request.sequence_id] += output.new_token_ids
    assert engine.error is None
    return list(told.values())


def three_adapters(root: Path, checkpoint: Path) -> dict[str, Path]:
    """By name: of all modules, of two with a rank and a scale of their own, and rank-stabilised."""
    make_adapter(root / "all", checkpoint, 1)
    make_adapter(root / "queries", checkpoint, 2, rank=2, modules=("q_proj", "down_proj"), lora_alpha=6)
    make_adapter(root / "rooted", checkpoint, 3, rank=4, use_rslora=True, alpha_pattern={"v_proj": 1})
    return {folder.name: folder for folder in root.iterdir()}


def make_adapter(
    folder: Path,
    checkpoint: Path,
    seed: int,
    rank: int = 4,
    modules: Sequence[str] = ALL,
    size: float = 0.5,
    **config: object,
) -> Path:
    """size: of the change, as a share of the weights' own."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if name.endswith(tuple(f"{module}.weight" for module in modules)):
            module = "base_model.model." + name.removesuffix(".weight")
            a = torch.randn(rank, weight.shape[1], generator=generator)
            b = torch.randn(weight.shape[0], rank, generator=generator)
            tensors[f"{module}.lora_A.weight"] = a * weight.std() * size
            tensors[f"{module}.lora_B.weight"] = b / rank**0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return folder


def as_sent(adapter: Path, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """TensorRT-LLM's lora_weights and lora_config of a folder, as its converter makes them."""
    pairs, rows, config = load_file(adapter / "adapter_model.safetensors"), [], []
    for name, a in pairs.items():
        found = re.search(r"layers\.(\d+)\..*\.(\w+)\.lora_A", name)
        if found is not None:
            b = scale * pairs[name.replace(".lora_A.", ".lora_B.")]
            rows.append(np.concatenate([a.numpy().ravel(), b.numpy().ravel()]))
            config.append((MODULE_IDS[found[2]], int(found[1]), len(a)))
    width = max(map(len, rows))
    padded = np.stack([np.pad(row, (0, width - len(row))) for row in rows])
    return padded.astype(np.float16), np.array(config, np.int32)


def sent(task_id: int, weights: np.ndarray | None = None, config: np.ndarray | None = None) -> SentAdapter:
    if weights is None or config is None:
        return SentAdapter(task_id)
    return SentAdapter(task_id, *(Matrix(one.dtype.char, one.shape, one.tobytes()) for one in (weights, config)))


def merged(folder: Path, checkpoint: Path, adapter: Path, scale: float = 1.0) -> Path:
    """W + scale * B A, computed by hand."""
    shutil.copytree(checkpoint, folder)
    weights, pairs = load_file(checkpoint / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in pairs.items():
        if ".lora_A." in name:
            own = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            b = pairs[name.replace(".lora_A.", ".lora_B.")]
            weights[own] = (weights[own].double() + scale * b.double() @ a.double()).float()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
