"""The `slipstream` command: finds the verb and runs it. A verb is a module of slipstream.commands; torch loads late."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import slipstream
from slipstream.commands import foreign_options, serve_openai
from slipstream.core.errors import SlipstreamError

# verb -> what `slipstream --help` says of it. Its module is slipstream.commands.<verb>, with "_" for "-".
VERBS = {
    "serve": "start tritonserver with a model repository or a checkpoint",
    "serve-openai": "start the OpenAI-compatible gateway and the chat page in front of a running server",
    "validate": "check models as a load would, without server and weights",
    "convert": "write a GGUF file, pickled weights or another form of tokenizer as a checkpoint folder",
    "bench": "load a running server: time to first token, time per token, tokens/s at rising concurrency",
    "chat": "talk to a model in the terminal, over gRPC",
    "install-backend": "put the backend of an installed wheel into a tritonserver",
    "worker": "serve ranks of this machine for an engine on another one",
    "doctor": "say what this machine can do and why not: GPU, libraries, server, models",
}
DESCRIPTION = "Serve large language models with Triton Inference Server."


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slipstream", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"slipstream {slipstream.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="VERB")
    for verb, summary in VERBS.items():
        module = import_module(f"slipstream.commands.{verb.replace('-', '_')}")
        command = commands.add_parser(
            verb,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # `serve-openai --model FOLDER` would be its --model-repository
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 done, 1 refused or failed with a reason on stderr, 2 wrong arguments, 130 interrupted."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if arguments.command == "serve" and unknown[:1] == ["--"]:  # a folder before other options ends the positional ones
        arguments.server_arguments += unknown[1:]
    elif unknown:
        advice = {"serve": foreign_options.advice, "serve-openai": serve_openai.advice}.get(arguments.command)
        told = advice(unknown, sys.argv[1:] if argv is None else argv) if advice is not None else ""
        parser.error(f"slipstream {arguments.command} has no {' '.join(unknown)}{told}")
    try:
        return arguments.run(arguments)
    except SlipstreamError as error:
        print(f"slipstream {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has seen enough; nothing more is to be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
