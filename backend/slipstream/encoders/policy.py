"""The policy file of the safety model: categories, their descriptions and thresholds, and the trained head beside it.

Policy: {"categories": {"<name>": {"descriptions": ["...", ...], "threshold": 0.5}}}.
Head (build/train_safety_head.py): per category a logistic regression over [embedding, similarity].
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.core.errors import ConfigError


@dataclass(frozen=True)
class Category:
    """threshold None: the head's own."""

    name: str
    descriptions: tuple[str, ...]
    threshold: float | None


@dataclass(frozen=True)
class HeadRow:
    """score = sigmoid(weights . embedding + similarity_weight * similarity + bias)."""

    weights: np.ndarray
    similarity_weight: float
    bias: float
    threshold: float


@dataclass(frozen=True)
class Head:
    """rows by category; similarity: for categories of the policy that the head was not trained on."""

    width: int
    rows: dict[str, HeadRow]
    similarity: HeadRow


def read_policy(path: Path) -> tuple[Category, ...]:
    """Raises ConfigError that names the place in the file."""
    loaded = _read_json("policy", path)
    categories = loaded.get("categories")
    if not isinstance(categories, dict) or not categories:
        raise ConfigError("policy", str(path), 'accepted: {"categories": {name: {"descriptions": [text, ...]}}}')
    others = sorted(set(loaded) - {"categories"})
    if others:
        raise ConfigError("policy", others[0], "unknown key; accepted: categories")
    return tuple(_category(str(name), entry) for name, entry in categories.items())


def _category(name: str, entry: Any) -> Category:
    field = f"policy.categories.{name}"
    if not isinstance(entry, dict) or set(entry) - {"descriptions", "threshold"}:
        raise ConfigError(field, entry, 'accepted: {"descriptions": [text, ...], "threshold": number (optional)}')
    descriptions = entry.get("descriptions")
    if (
        not isinstance(descriptions, list)
        or not descriptions
        or not all(isinstance(d, str) and d for d in descriptions)
    ):
        raise ConfigError(f"{field}.descriptions", descriptions, "accepted: a list of texts, at least one")
    threshold = entry.get("threshold")
    if threshold is not None and not (_is_number(threshold) and 0 < threshold < 1):
        raise ConfigError(f"{field}.threshold", threshold, "accepted: a number between 0 and 1")
    return Category(name, tuple(descriptions), threshold)


def read_head(path: Path, width: int) -> Head:
    """Raises ConfigError when it was made for another encoder."""
    loaded = _read_json("head", path)
    try:
        head = Head(
            width=int(loaded["width"]),
            rows={name: _row(row) for name, row in loaded["rows"].items()},
            similarity=_row(loaded["similarity"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        told = f"not a head that build/train_safety_head.py wrote ({error!r})"
        raise ConfigError("head", str(path), told) from None
    if head.width != width or any(len(row.weights) != width for row in head.rows.values()):
        accepted = f"accepted: one trained on this encoder's vectors of {width}; run build/train_safety_head.py"
        raise ConfigError("head", f"vectors of {head.width}", accepted)
    return head


def _row(row: dict[str, Any]) -> HeadRow:
    weights = np.array(row.get("weights", []), np.float32)
    return HeadRow(weights, float(row["similarity_weight"]), float(row["bias"]), float(row["threshold"]))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _read_json(field: str, path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(field, str(path), error.strerror or str(error)) from None
    except ValueError as error:
        raise ConfigError(field, str(path), f"not JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(field, str(path), "a JSON object is wanted")
    return loaded
