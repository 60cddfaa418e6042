"""Outputs with many log-probabilities, whose JSON would hold up the answers of all other requests if it was written at
once: it is written a little at a time, between steps. What comes behind one of the same request waits for it.

Output thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice

from slipstream.core.outputs import RequestOutput, TokenLogprobs
from slipstream.core.request import FinishReason
from slipstream.protocol.request_parser import ClientRequest
from slipstream.protocol.responses import MAX_WRITTEN_AT_ONCE, num_unwritten, write_entry

_WRITING_S = 0.001  # at a time
_ENTRIES = 16  # between two looks at the clock


@dataclass(slots=True)
class _Waiting:
    """entries: of the output, that are not written yet."""

    output: RequestOutput
    entries: Iterator[TokenLogprobs]


class LongOutputs:
    def __init__(self) -> None:
        self._waiting: dict[int, deque[_Waiting]] = {}  # by handle

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def holds(self, client: ClientRequest, output: RequestOutput) -> bool:
        """Whether this output has to wait; `write` returns it later. One that ends its request without an answer waits
        for nothing, and nothing that waited is sent."""
        if not (self._waiting or output.logprobs or output.prompt_logprobs):  # nearly always
            return False
        if output.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            self._waiting.pop(client.handle, None)
            return False
        waiting = self._waiting.get(client.handle)
        if waiting is None:
            if sum(num_unwritten(entries) for entries in _shown(client, output)) <= MAX_WRITTEN_AT_ONCE:
                return False
            waiting = self._waiting[client.handle] = deque()
        entries = (entry for entry in chain.from_iterable(_shown(client, output)) if entry is not None)
        waiting.append(_Waiting(output, entries))
        return True

    def write(self, live: Mapping[int, ClientRequest]) -> list[RequestOutput]:
        """Write for _WRITING_S. Returns the outputs that are written, in the order of their requests."""
        written: list[RequestOutput] = []
        until = time.monotonic() + _WRITING_S
        for handle, waiting in list(self._waiting.items()):
            client = live.get(handle)
            while waiting and client is not None:
                if not _is_written(client, waiting[0], until):
                    return written
                written.append(waiting.popleft().output)
            del self._waiting[handle]
        return written


def _shown(client: ClientRequest, output: RequestOutput) -> Iterator[list[TokenLogprobs] | list[TokenLogprobs | None]]:
    """The entries of an output that its client gets as JSON."""
    if output.logprobs and "logprobs" in client.outputs:
        yield output.logprobs
    if output.prompt_logprobs and "prompt_logprobs" in client.outputs:
        yield output.prompt_logprobs


def _is_written(client: ClientRequest, waiting: _Waiting, until: float) -> bool:
    """Write entries until then. Returns whether there are no more."""
    while time.monotonic() < until:
        entries = list(islice(waiting.entries, _ENTRIES))
        for entry in entries:
            write_entry(entry, client.token_text)
        if len(entries) < _ENTRIES:
            return True
    return False
