"""What other threads tell the engine's thread: sequences that come, and sequences that are to end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slipstream.core.request import FinishReason, Request

MAX_MESSAGES = 1024  # that a step reads: running requests wait meanwhile


@dataclass(slots=True)
class Add:
    requests: list[Request]


@dataclass(slots=True)
class Finish:
    """End one sequence, or all of a client's request, by its handle."""

    of: Request | int
    reason: FinishReason
    stop_reason: str | int | None = None


def ended_by(messages: Sequence[Finish], live: Iterable[Request]) -> list[tuple[Request, Finish]]:
    """The live sequences that these messages concern, each with one that does. One look at each sequence, however many
    messages there are: all clients of a full queue may leave at once."""
    if not messages:
        return []
    by_handle: dict[int, Finish] = {}
    by_sequence: dict[int, Finish] = {}  # by identity
    for message in messages:
        if isinstance(message.of, Request):
            by_sequence.setdefault(id(message.of), message)
        else:
            by_handle.setdefault(message.of, message)
    found = [(request, by_sequence.get(id(request)) or by_handle.get(request.handle)) for request in live]
    return [(request, message) for request, message in found if message is not None]
