#!/usr/bin/env python3
"""Train Medusa heads, an MTP module, an EAGLE-3 head or a small draft model, from a model's own predictions.

    .venv/bin/python build/train_heads.py medusa --model models/slipstream-demo-code --out models/slipstream-demo-medusa

Text comes packed (build/train_demo_model.py pack) or as JSON lines with a "text" or "token_ids" each (--texts;
build/generate_texts.py lets the model write them), of which a hundredth is held out. The checkpoint written has the
published layout of its kind; docs/speculation.md says how to serve it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from draft_heads.export import export
from draft_heads.kinds import KINDS, HeadsConfig
from draft_heads.text import line_text, packed_text
from draft_heads.train import summary, train

ROOT = Path(__file__).resolve().parent.parent
SCHEDULE = ("max_seconds", "max_steps", "batch_windows", "window_tokens", "muon_lr", "adam_lr", "eval_windows")
SIZES = ("num_heads", "num_blocks", "num_steps", "draft_vocab_size", "intermediate_size", "hidden_size", "num_layers")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument(
        "--model", type=Path, default=ROOT / "models" / "slipstream-demo-code", help="frozen checkpoint"
    )
    parser.add_argument("--out", type=Path, help="folder of the head (default: beside the model, -<kind>)")
    parser.add_argument("--packed", type=Path, default=ROOT / ".demo_data" / "packed", help="packed token ids")
    parser.add_argument("--texts", type=Path, help="JSON lines instead of packed ids")
    parser.add_argument("--state", type=Path, help="file of the training state; where it exists, training goes on")
    parser.add_argument("--tensorboard", type=Path, help="folder for its event files")
    defaults = HeadsConfig("", Path(), Path())
    for name in (*SCHEDULE, *SIZES):
        value = getattr(defaults, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    out = args.out or args.model.with_name(f"{args.model.name}-{args.kind}")
    out.mkdir(parents=True, exist_ok=True)
    skipped = ("kind", "model", "out", "packed", "texts", "state")
    options = {name: value for name, value in vars(args).items() if name not in skipped}
    config = HeadsConfig(args.kind, args.model, out, args.state, **options)
    try:
        text, held_out = packed_text(args.packed) if args.texts is None else line_text(args.texts, args.model)
        trainer = train(config, text, held_out)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    record = summary(trainer)
    path = export(trainer.head, record, out, args.model)
    print(json.dumps({key: record[key] for key in ("kind", "steps", "seconds", "given_right")}))
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
