"""Commands that an operator gives a model while it runs: sleep, wake up, reload its weights, load and unload adapters.
Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

SLEEP, WAKE_UP, RELOAD, STATE = "sleep", "wake_up", "reload_weights", "is_sleeping"
LOAD_LORA, UNLOAD_LORA, LIST_LORA = "load_lora_adapter", "unload_lora_adapter", "list_lora_adapters"
OF_LORA = (LOAD_LORA, UNLOAD_LORA, LIST_LORA)
COMMANDS = (SLEEP, WAKE_UP, RELOAD, STATE, *OF_LORA)
MODES = ("wait", "abort")
MAX_FOLDER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Control:
    """level: of a sleep: 1 keeps the weights in host memory, 2 reads them again when the model wakes. mode: "wait" for
    running requests, or "abort" them. folder: the checkpoint that a reload reads, "" for the same, or an adapter's.
    name: the adapter's.
    """

    command: str
    level: int = 1
    mode: str = "wait"
    folder: str = ""
    name: str = ""
