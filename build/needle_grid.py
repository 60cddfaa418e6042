"""The cells of a needle test: a fact hidden at a depth of a long text, a question after it, a score of the answer."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER_TOKENS = 32
_BETWEEN_THOUSANDS = re.compile(r"(?<=\d)[,_\u00a0\u202f](?=\d{3}(?!\d))")
MARGIN = 16  # tokens that joining pieces of text may add
REACH = 20  # a needle lies at most this part of a text before its depth
CITIES = ("Lisbon", "Nairobi", "Quito", "Osaka", "Tallinn", "Perth", "Lima", "Oslo", "Hanoi", "Cork", "Turin", "Accra")
NEEDLE = " The secret number of {city} is {number}. "
BEFORE = "Read the text below. A question about it follows.\n\n"
QUESTION = "\n\nWhat is the secret number of {city}? Answer with the number only."


@dataclass(frozen=True)
class Cell:
    """length: of the prompt and its answer, in tokens. depth: percent of the text before the needle.

    message: text, needle and question. prompt: the same as the model's chat template has it, or the message.
    """

    length: int
    depth: int
    number: str
    message: str
    prompt: str

    def score(self, answer: str) -> int:
        """1 if the number stands in the answer, alone and perhaps with thousands set apart (123,456)."""
        return int(self.number in re.findall(r"\d+", _BETWEEN_THOUSANDS.sub("", answer)))


def read_haystack(paths: Sequence[Path]) -> str:
    return "\n\n".join(path.read_text("utf-8") for path in paths)


def digest(text: str) -> str:
    """Names a haystack in a report: only figures over the same text compare."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Grid:
    """Cells over one haystack, cut by tokens and repeated if it is too short. Equal seeds give equal cells."""

    def __init__(
        self,
        haystack: str,
        tokenizer: PreTrainedTokenizerBase,
        is_chat: bool,
        seed: int = 0,
        answer_tokens: int = ANSWER_TOKENS,
    ) -> None:
        self._tokenizer, self._answer_tokens = tokenizer, answer_tokens
        self._is_chat, self._seed = is_chat, seed
        self._ids = self._encode(haystack)
        if not self._ids:
            raise ValueError("the haystack is empty")

    def cells(self, lengths: Sequence[int], depths: Sequence[int]) -> Iterator[Cell]:
        """Raises ValueError for a length that leaves no room for a text."""
        for length in lengths:
            for depth in depths:
                yield self._cell(length, depth)

    def _cell(self, length: int, depth: int) -> Cell:
        dice = random.Random(f"{self._seed} {length} {depth}")
        city, number = dice.choice(CITIES), str(dice.randrange(100_000, 1_000_000))
        needle, question = NEEDLE.format(city=city, number=number), QUESTION.format(city=city)
        around = len(self._encode(self._prompt(BEFORE + needle + question)))
        num_tokens = length - self._answer_tokens - MARGIN - around
        if num_tokens < MARGIN:
            raise ValueError(f"length {length}: accepted: at least {self._answer_tokens + 2 * MARGIN + around}")
        text = self._tokenizer.decode((self._ids * -(-num_tokens // len(self._ids)))[:num_tokens])
        place = _sentence_end(text, len(text) * depth // 100)
        message = BEFORE + text[:place] + needle + text[place:] + question
        return Cell(length, depth, number, message, self._prompt(message))

    def _prompt(self, message: str) -> str:
        if not self._is_chat:
            return message
        turn = [{"role": "user", "content": message}]
        return str(self._tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _sentence_end(text: str, place: int) -> int:
    """The last end of a sentence up to a place, or the place itself if the sentence began long before: tables, code and
    scripts with other full stops have none, and a depth must be what it says."""
    if place == 0:
        return 0
    return text.rfind(". ", max(0, place - len(text) // REACH), place) + 1 or place
