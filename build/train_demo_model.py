#!/usr/bin/env python3
"""Make the demo model: collect Python source, train a tokenizer, pack, train, export, evaluate, write the card.

Each subcommand reads what the one before it wrote under --data (default .demo_data/), so any of them can be
run again alone. `train` needs only torch and <data>/packed. docs/demo-model.md walks through it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from demo_model import sources

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / ".demo_data"
MODEL = ROOT / "models" / "slipstream-demo-code"


def run_collect(args: argparse.Namespace) -> None:
    from demo_model.collect import Selection, collect

    selection = Selection(tuple(args.stdlib), tuple(args.packages), tuple(args.installed))
    records = collect(args.data, selection, with_download=not args.no_download)
    for held_out in (False, True):
        chosen = [record for record in records if record.held_out == held_out]
        megabytes = sum(record.bytes for record in chosen) / 1e6
        label = "held out" if held_out else "training"
        print(f"{label}: {sum(record.files for record in chosen)} files, {megabytes:.1f} MB")


def run_tokenizer(args: argparse.Namespace) -> None:
    from demo_model.network import NetworkConfig
    from demo_model.tokenizer import sample_texts, save, train_tokenizer

    texts = sample_texts(args.data / "corpus" / "train.jsonl", int(args.sample_mb * 1e6))
    tokenizer = train_tokenizer(texts, args.vocab)
    save(tokenizer, args.model, NetworkConfig().max_tokens)
    encoded = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts[:500], add_special_tokens=False))
    print(f"{tokenizer.get_vocab_size()} tokens, {sum(map(len, texts[:500])) / encoded:.2f} characters per token")


def run_pack(args: argparse.Namespace) -> None:
    from demo_model.pack import pack
    from demo_model.tokenizer import load

    index = pack(load(args.model), args.data, args.every)
    print(json.dumps({split: entry["num_tokens"] for split, entry in index.items()}))


def run_train(args: argparse.Namespace) -> None:
    from dataclasses import replace

    from demo_model.network import PRESETS
    from demo_model.train import TrainConfig, train

    vocab_size = json.loads((args.data / "packed" / "index.json").read_text())["vocab_size"]
    preset = PRESETS[args.preset]
    network = replace(preset, vocab_size=vocab_size, num_layers=args.layers or preset.num_layers)
    config = TrainConfig(
        packed_dir=args.data / "packed",
        out_dir=args.out or args.data / "run",
        state_path=args.state,
        resume=args.resume,
        max_seconds=args.max_seconds,
        max_steps=args.max_steps,
        batch_windows=args.batch_windows,
        micro_windows=args.micro_windows,
        window_tokens=args.window_tokens,
        muon_lr=args.muon_lr,
        adam_lr=args.adam_lr,
        compile=not args.no_compile,
    )
    train(config, network)


def run_export(args: argparse.Namespace) -> None:
    from demo_model.export import export, random_weights, read_weights
    from demo_model.network import NetworkConfig

    if args.random:
        config, tensors = NetworkConfig(), random_weights(NetworkConfig())
    else:
        config, tensors = read_weights(args.run or args.data / "run")
    path = export(config, tensors, args.model)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def run_evaluate(args: argparse.Namespace) -> None:
    import math

    from demo_model.evaluate import PROMPTS, complete, held_out_loss

    loss, bits = held_out_loss(args.model, args.data / "packed", args.window_tokens, args.windows)
    print(f"held out: loss {loss:.4f}, perplexity {math.exp(loss):.3f} per token, {bits:.4f} bits per byte")
    for text in complete(args.model, tuple(args.prompt or PROMPTS), args.max_tokens):
        print("-" * 40 + "\n" + text)


def run_card(args: argparse.Namespace) -> None:
    from demo_model.card import write_card

    print(write_card(args.data, args.run or args.data / "run", args.model))


def add_train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="folder for weights and metrics (default <data>/run)")
    parser.add_argument("--state", type=Path, help="file for the full training state, saved before the rates fall")
    parser.add_argument("--resume", action="store_true", help="go on from --state where it exists")
    parser.add_argument("--max-seconds", type=float, default=530.0, help="wall-clock limit of the training")
    parser.add_argument("--max-steps", type=int, default=1_000_000)
    parser.add_argument("--batch-windows", type=int, default=128, help="windows per update")
    parser.add_argument("--micro-windows", type=int, default=128, help="windows per forward pass")
    parser.add_argument("--window-tokens", type=int, default=2048)
    parser.add_argument("--preset", choices=("demo", "draft"), default="demo", help="sizes of the network")
    parser.add_argument("--layers", type=int, default=0, help="instead of the preset's")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--no-compile", action="store_true", help="skip torch.compile (short trials, CPUs)")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="working folder (default .demo_data)")
    parser.add_argument(
        "--model", type=Path, default=MODEL, help="checkpoint folder (default models/slipstream-demo-code)"
    )
    commands = parser.add_subparsers(dest="command", required=True)

    collect = commands.add_parser("collect", help="gather, filter and deduplicate Python source")
    collect.add_argument("--stdlib", action="append", default=[], metavar="GLOB", help="standard library folders")
    collect.add_argument(
        "--packages", nargs="*", default=sources.PACKAGES, help="default: as demo_model/sources.py lists"
    )
    collect.add_argument("--installed", nargs="*", default=sources.INSTALLED_PACKAGES, help="read where installed")
    collect.add_argument("--no-download", action="store_true", help="use only the wheels in <data>/wheels")
    tokenizer = commands.add_parser("tokenizer", help="train the byte-level BPE on a sample of the corpus")
    tokenizer.add_argument("--vocab", type=int, default=4096)
    tokenizer.add_argument("--sample-mb", type=float, default=150.0)
    pack = commands.add_parser("pack", help="encode the corpus into compressed token ids")
    pack.add_argument("--every", type=int, default=1, help="take each N-th training file only")
    add_train_options(commands.add_parser("train", help="train on the packed ids (GPU, or CPU for a trial)"))
    export = commands.add_parser("export", help="write the checkpoint in Hugging Face layout")
    export.add_argument("--run", type=Path, help="what train wrote (default <data>/run)")
    export.add_argument("--random", action="store_true", help="untrained weights instead, to develop against")
    evaluate = commands.add_parser("evaluate", help="held-out perplexity and sample completions (CPU)")
    evaluate.add_argument("--windows", type=int, default=16)
    evaluate.add_argument("--window-tokens", type=int, default=2048)
    evaluate.add_argument("--prompt", action="append", help="instead of the built-in prompts")
    evaluate.add_argument("--max-tokens", type=int, default=96)
    card = commands.add_parser("card", help="write the model card from the records of collect, pack and train")
    card.add_argument("--run", type=Path, help="what train wrote (default <data>/run)")
    return parser


COMMANDS = {
    "collect": run_collect,
    "tokenizer": run_tokenizer,
    "pack": run_pack,
    "train": run_train,
    "export": run_export,
    "evaluate": run_evaluate,
    "card": run_card,
}


def main() -> None:
    args = build_parser().parse_args()
    COMMANDS[args.command](args)


if __name__ == "__main__":
    main()
