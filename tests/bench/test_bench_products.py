"""The products' bench: a layer's four products have the model's shapes, run in every format, and are compared alike."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


@pytest.fixture
def products(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(root / "tests/bench"))
    import bench_products

    return bench_products


def test_products_of_a_layer(products) -> None:
    specs = products.linear_specs(products.SHAPES["llama3-8b"])
    shapes = {name: (spec.out_features, spec.in_features) for name, spec in specs.items()}
    assert shapes == {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def test_every_format_is_timed(products, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    out = tmp_path / "products.jsonl"
    options = ["--shapes", "demo", "--formats", "none,w8a8_int8,w4a8_fp8", "--tokens", "1,3", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["bench_products.py", *options, "--out", str(out)])
    products.main()
    found = [json.loads(line) for line in out.read_text().splitlines()]
    wanted = [(name, count) for name in ("none", "w8a8_int8", "w4a8_fp8") for count in (1, 3)]
    assert [(r["format"], r["tokens"]) for r in found] == wanted
    assert all(set(r["us"]) == {"qkv", "o", "gate_up", "down"} and min(r["us"].values()) > 0 for r in found)
    assert "| demo: us of a layer's products, by tokens | 1 | 3 |" in capsys.readouterr().out


def test_ratios_say_the_worst_product_too(products) -> None:
    times = {"none": (20, 20, 40, 20), "fp8": (10, 16, 20, 4)}
    found = [
        {"shape": "demo", "format": name, "tokens": 8, "us": dict(zip(("qkv", "o", "gate_up", "down"), us))}
        for name, us in times.items()
    ]
    assert products.table("demo", found).splitlines()[2:] == [
        "| none | 100.0 |",
        "| fp8 | 50.0 |",
        "| **fp8 / none** | 2.00 (1.25) |",
    ]
