"""Commands that an operator gives a model while it runs: sleep, wake up, reload its weights. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

SLEEP, WAKE_UP, RELOAD, STATE = "sleep", "wake_up", "reload_weights", "is_sleeping"
COMMANDS = (SLEEP, WAKE_UP, RELOAD, STATE)
MODES = ("wait", "abort")
MAX_FOLDER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Control:
    """level: of a sleep: 1 keeps the weights in host memory, 2 reads them again when the model wakes. mode: "wait" for
    running requests, or "abort" them. folder: the checkpoint that a reload reads, "" for the same.
    """

    command: str
    level: int = 1
    mode: str = "wait"
    folder: str = ""
