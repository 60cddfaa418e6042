#!/usr/bin/env python3
"""Train Medusa heads, an MTP module or an EAGLE-3 head for a checkpoint, from the model's own predictions.

    python build/train_heads.py medusa --model models/slipstream-demo-code --out models/slipstream-demo-medusa

Text comes packed (build/train_demo_model.py pack) or as JSON lines with a "text" each (--texts), of which a hundredth
is held out. The checkpoint written has the published layout of its kind; docs/speculation.md says how to serve it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from draft_heads.export import export
from draft_heads.train import HeadsConfig, summary, train

ROOT = Path(__file__).resolve().parent.parent
HELD_OUT = 100  # one of so many texts


def read_text(args: argparse.Namespace) -> tuple[Any, Any]:
    """Token ids of training and held-out text."""
    if args.texts is None:
        from demo_model.pack import load_packed

        return load_packed(args.packed, "train")[0], load_packed(args.packed, "held_out")[0]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    with args.texts.open() as lines:
        texts = [json.loads(line)["text"] for line in lines]
    parts = [texts[::-HELD_OUT], [text for place, text in enumerate(reversed(texts)) if place % HELD_OUT]]
    held_out, training = ([tokenizer(text)["input_ids"] for text in part] for part in parts)
    return tuple(np.concatenate([np.array(ids) for ids in part]) for part in (training, held_out))  # type: ignore[return-value]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("medusa", "mtp", "eagle"))
    parser.add_argument(
        "--model", type=Path, default=ROOT / "models" / "slipstream-demo-code", help="frozen checkpoint"
    )
    parser.add_argument("--out", type=Path, help="folder of the head (default: beside the model, -<kind>)")
    parser.add_argument("--packed", type=Path, default=ROOT / ".demo_data" / "packed", help="packed token ids")
    parser.add_argument("--texts", type=Path, help="JSON lines instead of packed ids")
    parser.add_argument("--state", type=Path, help="file of the training state; where it exists, training goes on")
    parser.add_argument("--tensorboard", type=Path, help="folder for its event files")
    defaults = HeadsConfig("", Path(), Path())
    for name in ("max_seconds", "max_steps", "batch_windows", "window_tokens", "muon_lr", "adam_lr", "num_heads"):
        value = getattr(defaults, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    for name in ("num_blocks", "num_steps", "draft_vocab_size", "eval_windows"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    out = args.out or args.model.with_name(f"{args.model.name}-{args.kind}")
    out.mkdir(parents=True, exist_ok=True)
    skipped = ("kind", "model", "out", "packed", "texts", "state")
    options = {name: value for name, value in vars(args).items() if name not in skipped}
    config = HeadsConfig(args.kind, args.model, out, args.state, **options)
    trainer = train(config, *read_text(args))
    record = summary(trainer)
    path = export(trainer.head, record, out, args.model)
    print(json.dumps({key: record[key] for key in ("kind", "steps", "seconds", "given_right")}))
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
