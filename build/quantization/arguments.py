"""Checks of the arguments of build/quantize.py and build/evaluate.py, before anything is read or made."""

from __future__ import annotations

import argparse

from slipstream.nn.spec import DecoderSpec


def positive(value: str) -> int:
    """Type of argparse: an integer of at least 1."""
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a positive integer")
    return int(value)


def share(value: str) -> float:
    """Type of argparse: a number from 0 to 1."""
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number from 0 to 1")
    return number


def check_window(window_tokens: int, spec: DecoderSpec) -> None:
    """Raises ValueError for windows without a token to predict, or longer than the model's context."""
    if not 2 <= window_tokens <= spec.max_model_len:
        raise ValueError(f"window-tokens: {window_tokens}; this model takes 2 to {spec.max_model_len}")
