#!/usr/bin/env python3
"""Let a chat model write the text that its draft heads learn from: questions that it asks itself, and its answers.

    .venv/bin/python build/generate_texts.py --model MODEL --out texts.jsonl --num-questions 6000
    .venv/bin/python build/generate_texts.py --model MODEL --out texts.jsonl --num-passages 2000 --documents *.md

A question is what the model writes after the chat template's opening of a user's turn (arXiv:2406.08464); documents are
cut in passages, each behind a task. Answers are greedy for --greedy-share of the prompts, else drawn at --temperature.
One JSON line a conversation: token_ids (prompt and answer), num_prompt_tokens, temperature, finish_reason.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from slipstream import LLM, SamplingParams
from slipstream.engine.llm import Completion
from tqdm import tqdm
from transformers import AutoTokenizer

MARK = "@user@"  # stands for the user's text while the template is rendered
QUESTION_TOKENS = 64
LEAST_QUESTION_TOKENS = 4
BATCH = 2048  # prompts that are handed to the engine at once
TASKS = (
    "Summarize the following text in a few sentences.",
    "What are the main points of this text? List them.",
    "Explain the following text to a beginner.",
    "Rewrite the following text in simple words.",
    "Write three questions about the following text, with answers.",
    "Continue the following text.",
)


class ChatTemplate:
    """Token ids of a checkpoint's chat template around a user's text."""

    def __init__(self, llm: LLM, model: str) -> None:
        self._template = AutoTokenizer.from_pretrained(model)
        self._tokenizer = llm.engine.tokenizer
        if self._template.chat_template is None:
            raise ValueError(f"model: {model} has no chat template")

    def prompt(self, text: str) -> list[int]:
        """Up to where the answer begins."""
        return self._encode(self._render(text))

    def opening(self) -> list[int]:
        """Up to where the user's text begins. Raises ValueError if the template does not have that text as it is."""
        before, mark, _ = self._render(MARK).partition(MARK)
        if not mark:
            raise ValueError("model: its chat template changes the user's text, so it cannot ask itself")
        return self._encode(before)

    def _render(self, text: str) -> str:
        turns = [{"role": "user", "content": text}]
        return str(self._template.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)  # the template writes them itself


def ask_itself(llm: LLM, opening: list[int], count: int, seed: int) -> list[str]:
    """Up to `count` different questions. Those that did not end within QUESTION_TOKENS are left out."""
    params = [SamplingParams(max_tokens=QUESTION_TOKENS, temperature=1.0, seed=seed + place) for place in range(count)]
    questions = {
        completion.text.strip(): None
        for completion in generate(llm, [opening] * count, params, "questions")
        if completion.finish_reason == "stop" and len(completion.token_ids) > LEAST_QUESTION_TOKENS
    }
    return list(questions)


def passages(documents: Iterable[Path], count: int, characters: int, dice: random.Random) -> list[str]:
    """A task and a passage each, evenly from all documents. Passages are whole paragraphs of about `characters`."""
    found: list[str] = []
    for document in documents:
        passage = ""
        for paragraph in document.read_text(encoding="utf-8").split("\n\n"):
            if passage and len(passage) + len(paragraph) > characters:
                found.append(passage)
                passage = ""
            passage = f"{passage}\n\n{paragraph}".strip()[: 2 * characters]
    dice.shuffle(found)
    return [f"{dice.choice(TASKS)}\n\n{passage}" for passage in found[:count]]


def generate(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams], label: str
) -> Iterable[Completion]:
    """In order of the prompts; each batch's answers are yielded when all of it are done."""
    with tqdm(total=len(prompts), desc=label, unit="text", mininterval=5) as bar:
        for start in range(0, len(prompts), BATCH):
            yield from llm.generate(prompts[start : start + BATCH], params[start : start + BATCH])
            bar.update(min(BATCH, len(prompts) - start))


def write_texts(llm: LLM, args: argparse.Namespace) -> int:
    """Returns the number of tokens written."""
    dice, template = random.Random(args.seed), ChatTemplate(llm, args.model)
    tasks = passages(args.documents, args.num_passages, args.passage_characters, dice)
    prompts = ask_itself(llm, template.opening(), args.num_questions, args.seed << 32) + tasks
    dice.shuffle(prompts)
    token_ids = [template.prompt(prompt) for prompt in prompts]
    temperatures = [0.0 if dice.random() < args.greedy_share else args.temperature for _ in prompts]
    params = [
        SamplingParams(max_tokens=args.max_tokens, temperature=temperature, seed=(args.seed << 32) + place)
        for place, temperature in enumerate(temperatures)
    ]
    num_tokens = 0
    with args.out.open("w") as sink:
        for completion, temperature in zip(generate(llm, token_ids, params, "answers"), temperatures):
            ids = [*completion.prompt_token_ids, *completion.token_ids]
            num_tokens += len(ids)
            about = {"num_prompt_tokens": len(completion.prompt_token_ids), "temperature": temperature}
            record = {"token_ids": ids, **about, "finish_reason": completion.finish_reason}
            sink.write(json.dumps(record, separators=(",", ":")) + "\n")
    return num_tokens


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint with a chat template")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    parser.add_argument("--num-questions", type=int, default=6000, help="questions that the model asks itself")
    parser.add_argument("--documents", type=Path, nargs="*", default=[], help="UTF-8 texts")
    parser.add_argument("--num-passages", type=int, default=0, help="tasks about passages of the documents")
    parser.add_argument("--passage-characters", type=int, default=700)
    parser.add_argument("--max-tokens", type=int, default=320, help="of an answer")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--greedy-share", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=0, help="another seed writes other texts, as for a held-out file")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="parameters of config.pbtxt")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args, started = parse_args(arguments), time.monotonic()
    with LLM(args.model, **dict(option.split("=", 1) for option in args.set)) as llm:
        ready = time.monotonic()
        num_tokens = write_texts(llm, args)
    seconds = time.monotonic() - ready
    print(f"{args.out}: {num_tokens:,} tokens in {seconds:.1f} s, ready after {ready - started:.1f} s")


if __name__ == "__main__":
    main()
