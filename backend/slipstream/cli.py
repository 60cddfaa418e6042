"""The `slipstream` command. Each subcommand is a function that prints and returns the exit status; torch loads late."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from slipstream.core.errors import SlipstreamError


def validate(arguments: argparse.Namespace) -> int:
    """Say what loading each model folder would say."""
    from slipstream.runtime.validate import validate as report

    status = 0
    for folder in arguments.model_dir:
        try:
            print(report(folder))
        except SlipstreamError as error:
            print(f"{folder}: {error}", file=sys.stderr)
            status = 1
    return status


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slipstream", description="Tools around the Slipstream backend for Triton.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("validate", help="check model folders as a load would, without server and weights")
    command.add_argument("model_dir", nargs="+", help="a folder with config.pbtxt, such as model_repository/llm")
    command.set_defaults(run=validate)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
