"""What is asked: a catalogue of requests whose texts are known from a quiet run, and how each use of one goes wrong.

Everything is drawn from random.Random(seed): the same seed asks the same requests in the same order, client by client.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PROMPTS = (
    "import os\n",
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n",
    "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n",
    "for index, line in enumerate(lines):\n",
    '"""Reads a file and counts its words."""\n\nimport collections\n',
    "x = [1, 2, 3]\ny = [",
    "def ünïcödé(größe):\n    # 数える\n",
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}
REGEX = r"[a-z]{3,8}( = [0-9]{1,4})?\n"
GRAMMAR = 'root ::= "[" item ("," item)* "]"\nitem ::= [0-9]{1,3}\n'

WAYS = ("grpc stream", "grpc", "http stream", "http", "completions stream", "completions", "chat stream", "chat")
STREAMED = tuple(way for way in WAYS if way.endswith("stream"))
WHOLE = "whole"
# ending -> ways that can end so.  All but the last three are the client's doing: what came must begin the known text
ENDINGS: Mapping[str, tuple[str, ...]] = {
    "cancel": ("grpc stream", "grpc"),
    "cancel at the last": ("grpc stream",),
    "client deadline": ("grpc stream", "grpc"),
    "close": tuple(way for way in WAYS if not way.startswith("grpc")),
    "reset": tuple(way for way in WAYS if not way.startswith("grpc")),
    "kill": STREAMED,
    "slow reader": ("http stream", "completions stream", "chat stream"),
    "deadline": WAYS,
    "stop": ("grpc stream", "http stream"),
}
CANCELS = ("cancel", "cancel at the last", "client deadline", "kill")  # a gRPC stream ends so for its server
BY_SERVER = ("slow reader", "deadline", "stop")  # the server still owes an answer


@dataclass(frozen=True)
class Known:
    """A request of the catalogue.  settings: by the names that Triton's sampling_parameters and the gateway share."""

    number: int
    prompt: str
    settings: Mapping[str, Any]

    @property
    def num_sequences(self) -> int:
        return int(self.settings.get("n", 1))


@dataclass(frozen=True)
class Asked:
    """One use of it.  after: responses to receive before the ending; extras: settings that leave the text alone."""

    known: Known
    model: str
    way: str
    ending: str = WHOLE
    after: int = 0
    request_id: str = ""
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return self.way.startswith("chat")

    @property
    def is_through_gateway(self) -> bool:
        return self.way.startswith(("completions", "chat"))

    @property
    def is_streamed(self) -> bool:
        return self.way in STREAMED

    def __str__(self) -> str:
        ending = self.ending if self.ending == WHOLE else f"{self.ending} after {self.after}"
        return f"{self.way} to {self.model}, {ending}, request {self.known.number} {dict(self.known.settings)}"


def make_catalogue(rng: random.Random, size: int) -> list[Known]:
    return [Known(number, rng.choice(PROMPTS), _settings(rng)) for number in range(size)]


def _settings(rng: random.Random) -> dict[str, Any]:
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": rng.choice((1, 4, 12, 24, 40)), "ignore_eos": True}
    sampled = {**greedy, "temperature": 0.9, "top_k": rng.choice((5, 40)), "seed": rng.randrange(2**31)}
    kinds: tuple[dict[str, Any], ...] = (
        greedy,
        greedy,
        greedy,
        {**greedy, "ignore_eos": False},
        {**greedy, "stop": rng.sample(["\n\n", "self", "return", " = ", ")"], 2)},
        {**greedy, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {**greedy, "logprobs": rng.choice((1, 5))},
        {**greedy, "n": 3},
        {**greedy, "ignore_eos": False, "max_tokens": 40, "structured_outputs": {"json": SCHEMA}},
        {**greedy, "ignore_eos": False, "max_tokens": 24, "structured_outputs": {"regex": REGEX}},
        {**greedy, "ignore_eos": False, "max_tokens": 24, "structured_outputs": {"grammar": GRAMMAR}},
        sampled,
        sampled,
        {**sampled, "n": 2, "top_p": 0.9},
        {**sampled, "frequency_penalty": 0.4, "min_p": 0.02},
    )
    return dict(rng.choice(kinds))


@dataclass(frozen=True)
class Choice:
    """What a run draws from.  without: endings that are replaced by a whole answer."""

    ways: tuple[str, ...] = WAYS
    without: tuple[str, ...] = ()


def draw(rng: random.Random, catalogue: list[Known], model: str, has_drafts: bool, choice: Choice) -> Asked:
    """The next request of a client: half of them end as they should."""
    known, way = rng.choice(catalogue), rng.choice(choice.ways)
    if way == "http stream" and known.num_sequences > 1:
        way = "http"  # its events do not say of which sequence they are
    fitting = [ending for ending, ways in ENDINGS.items() if way in ways]
    weights = [0.2 if ending == "kill" else 1.0 for ending in fitting]  # a process of its own costs a second of CPU
    goes_wrong, badly = rng.random() < 0.5, rng.choices(fitting, weights)[0]
    ending = badly if goes_wrong and badly not in choice.without else WHOLE
    # everything is drawn, wanted or not: how far the generator is depends on nothing that a run's timing changes
    priority, interval, drafts = rng.choice((0, 0, 1, 5, 9)), rng.choice((0, 0, 0, 1, 2, 7)), rng.choice((-1, -1, 0, 2))
    timeout_ms = rng.choice((1, 50, 200, 600))
    extras: dict[str, Any] = {"priority": priority}
    if interval:
        extras["stream_interval"] = interval
    if has_drafts and drafts >= 0:
        extras["num_draft_tokens"] = drafts
    if ending == "deadline":
        extras["timeout_ms"] = timeout_ms
    request_id = f"chaos-{rng.getrandbits(64):016x}"
    return Asked(known, model, way, ending, rng.choice((0, 0, 1, 2, 5)), request_id, extras)
