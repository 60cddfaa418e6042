"""Write the model card (README.md of the checkpoint) from what collect, pack and train recorded."""

from __future__ import annotations

import json
from pathlib import Path

from demo_model.network import NetworkConfig

TEMPLATE = Path(__file__).with_name("card.md")
SUMMARY_KEYS = (
    "unique_tokens",
    "tokens_seen",
    "steps",
    "device",
    "seconds",
    "eval_windows",
    "held_out_loss",
    "held_out_perplexity",
    "held_out_bits_per_byte",
)


def write_card(data_dir: Path, train_dir: Path, model_dir: Path) -> Path:
    """Fill the template; returns the card's path.  Raises FileNotFoundError naming the record that is missing."""
    records = json.loads((data_dir / "corpus" / "sources.json").read_text())
    index = json.loads((data_dir / "packed" / "index.json").read_text())
    run = json.loads((train_dir / "train.json").read_text())
    network = NetworkConfig(**run["network"])
    training = [record for record in records if not record["held_out"]]
    weights = model_dir / "model.safetensors"
    text = TEMPLATE.read_text().format(
        parameters=run["num_bytes"] / 2 / 1e6,
        megabytes=weights.stat().st_size / 1e6,
        bytes_per_token=index["train"]["num_bytes"] / index["train"]["num_tokens"],
        train_files=sum(record["files"] for record in training),
        train_mb=sum(record["bytes"] for record in training) / 1e6,
        epochs=run["tokens_seen"] / run["unique_tokens"],
        batch_tokens=run["tokens_seen"] // run["steps"],
        rate=run["tokens_seen"] / run["seconds"] / 1e6,
        held_out_tokens=index["held_out"]["num_tokens"],
        held_out_names=held_out_names(records),
        window_tokens=network.max_tokens,
        curve="\n".join(curve_rows(run["history"])),
        rows="\n".join(source_rows(records)),
        **{key: getattr(network, key) for key in network.__dataclass_fields__},
        **{key: run[key] for key in SUMMARY_KEYS},
    )
    path = model_dir / "README.md"
    path.write_text(text)
    return path


def held_out_names(records: list[dict[str, object]]) -> str:
    from demo_model.sources import HELD_OUT_STDLIB

    packages = [f"{r['name']} {r['version']}" for r in records if r["held_out"] and r["name"] != "cpython"]
    return ", ".join([*packages, "and of the standard library " + ", ".join(f"`{name}`" for name in HELD_OUT_STDLIB)])


def curve_rows(history: list[dict[str, float]], points: int = 12) -> list[str]:
    """About `points` rows of the loss curve, evenly spaced, the last one included."""
    stride = max(1, len(history) // points)
    chosen = history[::-1][::stride][::-1]
    return [f"| {r['step']} | {r['seconds']:.0f} | {r['loss']:.3f} | {r['lr']:.3f} |" for r in chosen]


def source_rows(records: list[dict[str, object]]) -> list[str]:
    """One row per source, training first, by size; the standard library's versions are rows of their own."""
    ordered = sorted(records, key=lambda r: (bool(r["held_out"]), -int(str(r["bytes"]))))
    return [
        f"| {r['name']}{' (held out)' if r['held_out'] else ''} | {r['version']} | {r['licence']} "
        f"| {r['files']} | {int(str(r['bytes'])) / 1e6:.2f} |"
        for r in ordered
    ]
