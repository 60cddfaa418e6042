"""Check models as a load would, without a server and without reading weights.

    slipstream validate model_repository/llm
    slipstream validate model_repository
    slipstream validate /models/Llama-3.1-8B-Instruct --set max_model_len=32768

Prints the memory plan of each model (or what is wrong with it, by field); the exit status is 1 if one would not load.
A checkpoint is checked as `slipstream serve` would serve it. Of a repository ensembles and models of Triton's Python
backend are passed over.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from slipstream.commands import serve, served_folder
from slipstream.core.errors import ConfigError, SlipstreamError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    told = "a model's folder, which has a config.pbtxt, a repository of such folders, or a checkpoint"
    parser.add_argument("what", nargs="+", metavar="FOLDER_OR_ID", help=told)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter for a checkpoint (repeatable)"
    )


def run(arguments: argparse.Namespace) -> int:
    status = 0
    for what in (each for given in arguments.what for each in _models(given)):
        try:
            print(_report(what, arguments))
        except SlipstreamError as error:
            print(f"{what}: {error}", file=sys.stderr)
            status = 1
    return status


def _models(given: str) -> list[str]:
    folder = Path(given)
    return served_folder.models_of(folder) if served_folder.is_repository(folder) else [given]


def _report(what: str, arguments: argparse.Namespace) -> str:
    from slipstream.engine.validate import passed_over, validate

    folder = Path(what)
    if not served_folder.is_model_folder(folder) and (not folder.is_dir() or served_folder.is_checkpoint(folder)):
        with tempfile.TemporaryDirectory(prefix="slipstream-") as scratch:
            return validate(serve.write_repository(Path(scratch), what, serve.settings_of(arguments)) / "llm")
    if arguments.set:
        told = "needs a checkpoint; a model's folder has its parameters in config.pbtxt"
        raise ConfigError("--set", arguments.set[0], told)
    reason = passed_over(folder)
    return f"{what}: {reason}" if reason else validate(folder)
