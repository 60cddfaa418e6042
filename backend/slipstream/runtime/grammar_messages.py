"""What crosses between the engine and its grammar processes. Imports nothing heavy: both sides read it."""

from __future__ import annotations

from typing import NamedTuple

from slipstream.core.config import GuidedConfig

MAX_KILLS = 5  # of processes in a row, from outside or before they were ready, that a request or a trial outlasts


class Setup(NamedTuple):
    """What the engine says first."""

    tokenizer_path: str
    vocab_size: int
    eos_token_ids: list[int]
    limits: GuidedConfig


class Answer(NamedTuple):
    """To one job of a worker. error: of the text or of xgrammar. can_go_on: whether any token may follow. dead: places
    of the paths of a walk after which none may. cpu_s: of the job."""

    error: str = ""
    is_terminated: bool = False
    can_go_on: bool = True
    dead: tuple[int, ...] = ()
    cpu_s: float = 0.0
