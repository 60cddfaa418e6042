"""Not written yet."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None: ...
def run(arguments: argparse.Namespace) -> int:
    return 1
