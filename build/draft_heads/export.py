"""Write trained heads as checkpoints in their published layouts, with what their training measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from slipstream.nn.tensor_file import write_tensors

from draft_heads.heads import Medusa
from draft_heads.kinds import Head

CHOICES_FILE = "medusa_choices.json"


def export(head: Head, record: dict[str, Any], out_dir: Path, model_dir: Path) -> Path:
    """bf16 tensors, a config.json, training.json and, for Medusa, the tree for the accuracies measured."""
    out_dir.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (value.detach().to(torch.bfloat16) if value.is_floating_point() else value).contiguous().cpu()
        for name, value in head.checkpoint().items()
    }
    path = out_dir / "model.safetensors"
    write_tensors(tensors, path)
    _write(out_dir / "config.json", head.config(json.loads((model_dir / "config.json").read_text())))
    _write(out_dir / "training.json", record)
    if isinstance(head, Medusa):
        (out_dir / CHOICES_FILE).write_text(json.dumps(best_choices(record["ranks"], 63)) + "\n")
    return path


def best_choices(ranks: list[list[float]], num_nodes: int) -> list[list[int]]:
    """The tree of the likeliest nodes, likeliest first. ranks[head][rank]: accuracy of that draft.

    The value of a path is the product of its accuracies. A node is worth no more than its parent, so adding the best
    leaf repeatedly gives the best tree of every size. Source: arXiv:2401.10774, section 2.3.3.
    """
    chosen: list[list[int]] = []
    frontier = [(rate, [rank]) for rank, rate in enumerate(ranks[0])]
    while frontier and len(chosen) < num_nodes:
        value, path = max(frontier, key=lambda node: node[0])
        frontier.remove((value, path))
        chosen.append(path)
        if len(path) < len(ranks):
            frontier += [(value * rate, [*path, rank]) for rank, rate in enumerate(ranks[len(path)])]
    return chosen


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n")
