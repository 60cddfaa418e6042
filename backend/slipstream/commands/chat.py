"""Talk to a model in the terminal, over gRPC, with text as it is made.

    slipstream chat --url localhost:8001 --checkpoint /models/Llama-3.1-8B-Instruct

With a checkpoint folder (by --checkpoint, or when config.pbtxt says an absolute path that is on this machine) messages
go through its chat template; without one they are a plain transcript, which base models understand too. Ctrl-C stops an
answer, /new begins a new talk, Ctrl-D or /quit ends.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.commands.terminal_stream import connect, generate, model_parameters
from slipstream.core.errors import RequestError

Render = Callable[[list[dict[str, str]]], str]
TRANSCRIPT_STOP = "\nUser:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="localhost:8001", metavar="HOST:PORT", help="Triton's gRPC (%(default)s)")
    parser.add_argument("--model", default="llm", help="(%(default)s)")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="folder with the model's chat template")
    parser.add_argument("--system", default="", metavar="TEXT", help="a system message")
    parser.add_argument("--max-tokens", type=int, default=512, help="of an answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    loop = asyncio.new_event_loop()  # kept between answers; at the prompt Python handles Ctrl-C again
    asyncio.set_event_loop(loop)
    try:
        talk(loop, arguments)
    finally:
        loop.close()
    return 0


def talk(loop: asyncio.AbstractEventLoop, arguments: argparse.Namespace) -> None:
    channel, stub = connect(arguments.url)
    try:
        parameters = loop.run_until_complete(model_parameters(stub, arguments.model))
        render, why_plain = choose_template(arguments.checkpoint, parameters)
        if why_plain:
            print(f"(plain transcript: {why_plain})", file=sys.stderr)
        begin = [{"role": "system", "content": arguments.system}] if arguments.system else []
        messages = list(begin)
        while (line := read_line()) not in (None, "/quit"):
            if line == "/new":
                messages = list(begin)
            elif line:
                messages.append({"role": "user", "content": line})
                text = loop.run_until_complete(answer(stub, arguments, render(messages), is_plain=bool(why_plain)))
                messages.append({"role": "assistant", "content": text})
    finally:
        loop.run_until_complete(channel.close())


def read_line() -> str | None:
    """None at the end of the input."""
    try:
        return input(">>> ").strip()
    except EOFError:
        return None


def choose_template(checkpoint: Path | None, parameters: dict[str, str]) -> tuple[Render, str]:
    """The function that renders messages to a prompt, and the reason if it is only a transcript ("" if not)."""
    folder = checkpoint or next(
        (
            Path(parameters[key])
            for key in ("tokenizer", "tokenizer_dir", "model")
            if Path(parameters.get(key, "")).is_absolute()
        ),
        None,
    )
    if folder is None or not folder.is_dir():
        return transcript, "the checkpoint is not known here; give --checkpoint"
    try:
        from slipstream.server.chat_template import load_template
    except ImportError as error:
        return transcript, f"{error.name} is not installed"
    template = load_template(folder)
    if template is None:
        return transcript, "the checkpoint has no chat template"
    return template.render, ""


def transcript(messages: list[dict[str, str]]) -> str:
    names = {"user": "User", "assistant": "Assistant", "system": "System"}
    return "\n".join(f"{names[m['role']]}: {m['content']}" for m in messages) + "\nAssistant:"


async def answer(stub: Any, arguments: argparse.Namespace, prompt: str, is_plain: bool) -> str:
    """Print an answer as it streams; Ctrl-C ends it. Returns the text."""
    from slipstream.server.generation import Generation

    sampling: dict[str, Any] = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    sampling |= {"stop": [TRANSCRIPT_STOP]} if is_plain else {"add_special_tokens": False}
    generation = Generation(arguments.model, prompt, sampling, ("text_output", "num_output_tokens"), stream=True)
    said = Said()
    task = asyncio.ensure_future(print_answer(stub, generation, said))
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        print(" [stopped]", end="")
    except RequestError as error:
        print(f"[{error}]", end="")
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
    print(flush=True)
    print(f"[{said.figures()}]", file=sys.stderr)
    return said.text


@dataclass
class Said:
    """The text received so far."""

    text: str = ""
    num_tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    first: float = 0.0

    def figures(self) -> str:
        seconds = time.perf_counter() - self.started
        ttft_ms = (self.first - self.started) * 1e3 if self.first else 0.0
        return f"{self.num_tokens} tokens, first after {ttft_ms:.0f} ms, {self.num_tokens / seconds:.0f} tokens/s"


async def print_answer(stub: Any, generation: Any, said: Said) -> None:
    async for response in generate(stub, generation):
        said.first = said.first or time.perf_counter()
        said.num_tokens += response.integer("num_output_tokens")
        said.text += response.text("text_output")
        print(response.text("text_output"), end="", flush=True)
