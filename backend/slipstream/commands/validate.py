"""Check model folders as a load would, without a server and without reading weights.

Prints the memory plan of each model (or what is wrong with it, by field); the exit status is 1 if one would not load.
Ensembles and models of Triton's Python backend are passed over, so that model_repository/* may be given.

    slipstream validate model_repository/llm
"""

from __future__ import annotations

import argparse
import sys

from slipstream.core.errors import SlipstreamError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_dir", nargs="+", help="a folder with config.pbtxt, such as model_repository/llm")


def run(arguments: argparse.Namespace) -> int:
    from slipstream.engine.validate import passed_over
    from slipstream.engine.validate import validate as report

    status = 0
    for folder in arguments.model_dir:
        try:
            reason = passed_over(folder)
            print(f"{folder}: {reason}" if reason else report(folder))
        except SlipstreamError as error:
            print(f"{folder}: {error}", file=sys.stderr)
            status = 1
    return status
