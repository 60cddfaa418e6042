#!/usr/bin/env python3
"""Hide a number at every depth of texts of every length, ask a served model for it, and draw the grid of its answers.

    .venv/bin/python build/needle.py --tokenizer /checkpoints/model --lengths 8k,32k,128k --output install/needle
    .venv/bin/python build/needle.py --openai http://localhost:9000/v1 --tokenizer /checkpoints/model --lengths 4k

Greedy, at most 32 tokens (--answer-tokens); a cell counts if its number is in the answer. Prompts are text, cut by the
tokens of --tokenizer. --again asks each cell twice: a prefix hit has to give the same text. --same-as compares the
texts with those of an earlier run, such as one with other chunks; exit status 1 if a text differs. A single needle is
the easiest test of long contexts: models pass it at lengths where they fail others (RULER, arXiv:2404.06654).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from needle_grid import ANSWER_TOKENS, Cell, Grid, digest, read_haystack
from slipstream.core.errors import SlipstreamError

ROOT = Path(__file__).resolve().parent.parent
REPLY_TIMEOUT_S = 600
ERROR_BYTES = 500  # of a server's refusal that are shown
Answer = Callable[[Cell], str]
Result = dict[str, Any]


def over_grpc(url: str, model: str, sampling: dict[str, Any]) -> Answer:
    """Asks Triton's gRPC with the text of the prompt."""
    from slipstream.commands.terminal_stream import connect, generate
    from slipstream.server.generation import Generation

    async def ask(prompt: str) -> str:
        channel, stub = connect(url)
        try:
            generation = Generation(model, prompt, dict(sampling), ("text_output",), stream=True)
            return "".join([response.text("text_output") async for response in generate(stub, generation)])
        finally:
            await channel.close()

    return lambda cell: asyncio.run(ask(cell.prompt))


def over_openai(url: str, model: str, sampling: dict[str, Any], is_chat: bool, key: str) -> Answer:
    """Asks an OpenAI-compatible server, which has the chat template itself."""
    path = "chat/completions" if is_chat else "completions"

    def ask(cell: Cell) -> str:
        asked = {"messages": [{"role": "user", "content": cell.message}]} if is_chat else {"prompt": cell.prompt}
        body = json.dumps({"model": model, **sampling, **asked}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{url.rstrip('/')}/{path}", data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=REPLY_TIMEOUT_S) as reply:
                choice = json.loads(reply.read())["choices"][0]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{error}: {error.read(ERROR_BYTES).decode('utf-8', 'replace')}") from None
        text = choice["message"]["content"] if is_chat else choice["text"]
        return text or ""  # null where reasoning has taken all tokens

    return ask


def ask_all(cells: Iterator[Cell], answer: Answer, again: bool = False) -> Iterator[Result]:
    for cell in cells:
        text = answer(cell)
        result: Result = {"length": cell.length, "depth": cell.depth, "number": cell.number, "answer": text}
        result["score"] = cell.score(text)
        if again:
            result["same_again"] = answer(cell) == text
        yield result


def read_earlier(path: Path | None, about: dict[str, object]) -> list[Result]:
    """The results of an earlier run, none without one. Raises ValueError for other texts or seeds than these."""
    if path is None:
        return []
    earlier = json.loads(path.read_text())
    if not isinstance(earlier, dict) or not isinstance(earlier.get("results"), list):
        raise ValueError(f"--same-as {path}: accepted: needle.json of an earlier run")
    for name in ("seed", "haystack"):
        if earlier.get(name) != about[name]:
            raise ValueError(f"--same-as {path}: {name} {earlier.get(name)!r}; accepted: {about[name]!r}")
    return earlier["results"]


def differing(results: Sequence[Result], earlier: Sequence[Result]) -> list[tuple[int, int]]:
    """(length, depth) of cells whose text differs from the earlier run's, or from its own second answer."""
    known = {(one["length"], one["depth"], one["number"]): one["answer"] for one in earlier}
    return [
        (one["length"], one["depth"])
        for one in results
        if known.get((one["length"], one["depth"], one["number"]), one["answer"]) != one["answer"]
        or not one.get("same_again", True)
    ]


def _cells(results: Sequence[Result]) -> set[tuple[int, int]]:
    return {(one["length"], one["depth"]) for one in results}


def table(results: Sequence[Result]) -> str:
    """A line for each length: its scores by depth, and their mean."""
    depths = sorted({result["depth"] for result in results})
    lines = ["| tokens | " + " | ".join(f"{depth} %" for depth in depths) + " | found |"]
    lines.append("|" + "--:|" * (len(depths) + 2))
    for length in sorted({result["length"] for result in results}):
        row = {result["depth"]: result["score"] for result in results if result["length"] == length}
        found = f"{sum(row.values())} of {len(row)}"
        lines.append(f"| {length} | " + " | ".join(str(row.get(depth, "")) for depth in depths) + f" | {found} |")
    return "\n".join(lines)


def draw(results: Sequence[Result], title: str, path: Path) -> None:
    """Depths over lengths; green: found. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = sorted({result["length"] for result in results})
    depths = sorted({result["depth"] for result in results})
    scores = {(result["depth"], result["length"]): result["score"] for result in results}
    cells = [[scores.get((depth, length), float("nan")) for length in lengths] for depth in depths]
    figure, axes = pyplot.subplots(figsize=(2 + 0.7 * len(lengths), 2 + 0.35 * len(depths)), layout="constrained")
    axes.imshow(cells, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length / 1024:g}k" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth} %" for depth in depths])
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth of the needle")
    axes.set_title(title, fontsize="medium")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def numbers(text: str) -> list[int]:
    """ "8k,32768" -> [8192, 32768]. Raises ValueError."""
    return [int(one[:-1]) * 1024 if one.lower().endswith("k") else int(one) for one in text.split(",")]


def percents(text: str) -> list[int]:
    """Raises ValueError."""
    found = numbers(text)
    if not all(0 <= one <= 100 for one in found):
        raise ValueError(text)
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001", help="Triton's gRPC (%(default)s)")
    parser.add_argument("--openai", metavar="URL", help="an OpenAI-compatible server instead, such as …:9000/v1")
    parser.add_argument("--key", default="none", help="its API key")
    parser.add_argument("--model", default="llm", help="as the server names it (%(default)s)")
    parser.add_argument("--tokenizer", required=True, help="the checkpoint's folder")
    parser.add_argument("--no-chat", action="store_true", help="plain text: do not apply the chat template")
    more = "of an answer; more where the model reasons (%(default)s)"
    parser.add_argument("--answer-tokens", type=int, default=ANSWER_TOKENS, help=more)
    parser.add_argument("--lengths", type=numbers, default=numbers("4k,8k"), help="tokens, such as 8k,32k,128k")
    parser.add_argument("--depths", type=percents, default=list(range(0, 101, 10)), help="percent (0,10,…,100)")
    parser.add_argument("--haystack", type=Path, nargs="+", help="text files (README.md and docs/*.md)")
    parser.add_argument("--seed", type=int, default=0, help="of cities and numbers")
    parser.add_argument("--again", action="store_true", help="ask twice; the texts must be equal")
    parser.add_argument("--same-as", type=Path, metavar="JSON", help="needle.json of an earlier run")
    parser.add_argument("--output", type=Path, default=ROOT / "install/needle", help="folder (%(default)s)")
    return parser.parse_args(argv)


def answer_of(args: argparse.Namespace) -> Answer:
    sampling = {"max_tokens": args.answer_tokens, "temperature": 0.0}
    if args.openai:
        return over_openai(args.openai, args.model, sampling, not args.no_chat, args.key)
    if not args.no_chat:
        sampling["add_special_tokens"] = False  # the template writes them
    return over_grpc(args.url, args.model, sampling)


def run(args: argparse.Namespace) -> int:
    from transformers import AutoTokenizer

    text = read_haystack(args.haystack or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    is_chat = not args.no_chat
    results: list[Result] = []
    about = {"model": args.model, "seed": args.seed, "haystack": digest(text), "results": results}
    earlier = read_earlier(args.same_as, about)
    grid = Grid(text, AutoTokenizer.from_pretrained(args.tokenizer), is_chat, args.seed, args.answer_tokens)
    args.output.mkdir(parents=True, exist_ok=True)
    for result in ask_all(grid.cells(args.lengths, args.depths), answer_of(args), args.again):
        results.append(result)
        print(json.dumps(result), flush=True)
        # a grid of long texts takes hours: what is known is kept if a later cell fails
        (args.output / "needle.json").write_text(json.dumps(about, indent=1) + "\n")
    print(table(results))
    try:
        draw(results, f"{args.model}: needles found, seed {args.seed}", args.output / "needle.png")
    except ImportError as error:
        print(f"no picture: {error}; pip install slipstream[tools]")
    if args.same_as and not _cells(results) & _cells(earlier):
        raise ValueError(f"--same-as {args.same_as}: has none of these cells; accepted: the same lengths and depths")
    changed = differing(results, earlier)
    if changed:
        print(f"other texts at (tokens, depth): {changed}")
    return 1 if changed else 0


def main(argv: Sequence[str]) -> int:
    try:
        return run(parse(argv))
    except (SlipstreamError, ValueError, OSError, urllib.error.URLError) as error:
        print(f"needle: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
