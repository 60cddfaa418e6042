"""The demo checkpoint in models/: loads in transformers, is small, predicts unseen Python well, completes prompts.

The measured text below was written for this test, so no training corpus holds it.
"""

from __future__ import annotations

import ast
import json
import math
import random
from pathlib import Path

import pytest
import torch
from huggingface_texts import greedy_continuation
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

MODEL_DIR = Path(__file__).resolve().parents[2] / "models" / "slipstream-demo-code"
MAX_BYTES = 32_000_000
MAX_PERPLEXITY = 6.0  # measured: 5.31

UNSEEN = '''"""Parking garage: levels, bays and tickets."""

import math
from dataclasses import dataclass, field


@dataclass
class Ticket:
    plate: str
    entered_at: float
    bay: int


@dataclass
class Garage:
    """A garage with a fixed number of bays and a price per started hour."""

    num_bays: int
    price_per_hour: float = 2.5
    tickets: dict[str, Ticket] = field(default_factory=dict)

    def free_bays(self):
        """Return the numbers of the bays that nobody uses, lowest first."""
        used = {ticket.bay for ticket in self.tickets.values()}
        return [bay for bay in range(self.num_bays) if bay not in used]

    def enter(self, plate, now):
        """Give the car the lowest free bay.

        Raises ValueError if the garage is full or the car is already inside.
        """
        if plate in self.tickets:
            raise ValueError(f"car {plate} is already inside")
        bays = self.free_bays()
        if not bays:
            raise ValueError("the garage is full")
        ticket = Ticket(plate, now, bays[0])
        self.tickets[plate] = ticket
        return ticket

    def leave(self, plate, now):
        """Remove the car and return what its driver has to pay."""
        ticket = self.tickets.pop(plate, None)
        if ticket is None:
            raise KeyError(plate)
        hours = math.ceil((now - ticket.entered_at) / 3600)
        return hours * self.price_per_hour


def busiest_hour(tickets):
    """Return the hour of the day in which most cars came."""
    counts = {}
    for ticket in tickets:
        hour = int(ticket.entered_at // 3600) % 24
        counts[hour] = counts.get(hour, 0) + 1
    return max(counts, key=counts.get)


if __name__ == "__main__":
    garage = Garage(num_bays=3)
    garage.enter("B-XY 123", now=0)
    print(garage.leave("B-XY 123", now=5400))
'''


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()


def complete(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompt: str, max_tokens: int = 48) -> str:
    """Greedy continuation of `prompt`, without the prompt."""
    found = greedy_continuation(model, tokenizer.encode(prompt), max_tokens)
    return tokenizer.decode(found, skip_special_tokens=True)


def longest_file(text: str) -> str:
    """The longest run of whole lines from the start of `text` that is a Python file (a completion ends anywhere)."""
    lines = text.split("\n")
    for end in range(len(lines) - 1, 0, -1):
        try:
            ast.parse("\n".join(lines[:end]))
        except SyntaxError:
            continue
        return "\n".join(lines[:end])
    return ""


def test_the_checkpoint_is_a_small_llama(model: LlamaForCausalLM) -> None:
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert isinstance(model, LlamaForCausalLM)
    assert config["tie_word_embeddings"] and config["torch_dtype"] == "bfloat16"
    assert 10e6 < sum(p.numel() for p in model.parameters()) < 20e6
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= MAX_BYTES


@pytest.mark.parametrize(
    "text",
    [UNSEEN, "", " ", "\r\n\t \n\n   x", "naïve – 数据 😀 \u200d\x00\x7f", "<|endoftex", "a" * 500],
    ids=["code", "empty", "space", "whitespace", "unicode", "almost special", "repeats"],
)
def test_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_random_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    chance = random.Random(0)
    pieces = [" ", "  ", "\n", "\t", "_", ".", "é", "漢", "🙂", "def", "x1", "'", "\\", "\u0301", "\x1b"]
    for _ in range(200):
        text = "".join(chance.choices(pieces, k=30))
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_every_byte_has_a_token_of_its_own(tokenizer: PreTrainedTokenizerBase) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    vocab = tokenizer.get_vocab()
    assert len(vocab) == 4096 and len(ByteLevel.alphabet()) == 256
    assert set(ByteLevel.alphabet()) <= set(vocab)


def test_a_prompt_starts_a_file(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.encode("") == [tokenizer.bos_token_id]
    assert tokenizer.encode("def") == [tokenizer.bos_token_id, *tokenizer.encode("def", add_special_tokens=False)]


def test_line_breaks_stand_alone_so_prompts_may_end_in_one(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("def f():\n    return 1\n"))
    assert [token for token in tokens if "Ċ" in token] == ["Ċ", "Ċ"]


def test_unseen_code_has_low_perplexity(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = torch.tensor([tokenizer.encode(UNSEEN)])
    with torch.inference_mode():
        logits = model(ids[:, :-1]).logits[0]
    perplexity = math.exp(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))
    assert 1.5 < perplexity < MAX_PERPLEXITY, f"perplexity {perplexity:.2f}"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("def fibonacci(n):\n", "return"),
        ("class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n", "self.items"),
        ("import os\n\n\ndef list_python_files(directory):\n    for name in os.", "directory"),
        ("try:\n    value = int(text)\n", "except"),
        ("def read_json(path):\n    with open(path) as f:\n        return json.", "load"),
    ],
    ids=["function", "method", "call", "try", "attribute"],
)
def test_completions_are_python(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompt: str, expected: str
) -> None:
    text = prompt + complete(model, tokenizer, prompt)
    written = longest_file(text).removeprefix(prompt)
    assert len(written) < len(longest_file(text)), f"the completion leaves the prompt unfinished:\n{text}"
    assert expected in written, text


def test_the_chat_template_makes_comments(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Write Python."},
        {"role": "user", "content": "Add two numbers.\nName it add."},
        {"role": "assistant", "content": "def add(a, b):\n    return a + b"},
        {"role": "user", "content": "Now subtract."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|endoftext|># System: Write Python.\n# User: Add two numbers.\n# Name it add.\n"
        "def add(a, b):\n    return a + b\n\n# User: Now subtract.\n\n"
    )
    ast.parse(text.removeprefix("<|endoftext|>"))
