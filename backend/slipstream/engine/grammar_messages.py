"""Messages between the engine and its grammar processes. Imports nothing heavy, because both sides import it."""

from __future__ import annotations

from typing import NamedTuple

from slipstream.core.config import StructuredOutputConfig

MAX_KILLS = 5  # consecutive kills of processes, from outside or before they were ready, that a request survives


class Setup(NamedTuple):
    """The engine's first message."""

    tokenizer_path: str
    vocab_size: int
    eos_token_ids: list[int]
    limits: StructuredOutputConfig


class Answer(NamedTuple):
    """The answer to one job of a worker. error: in the text or from xgrammar. can_go_on: whether any token may follow.
    dead: indices of a walk's paths after which none may. cpu_s: CPU time of the job."""

    error: str = ""
    is_terminated: bool = False
    can_go_on: bool = True
    dead: tuple[int, ...] = ()
    cpu_s: float = 0.0
