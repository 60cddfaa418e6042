"""Finds races between CUDA streams on a CPU: what one stream writes and another touches without having waited for it.

`watched()` replaces the streams and events of torch by clocks. Operations run at once, as on any CPU, but each counts
for the current stream: it may only touch memory after what other streams did to it if events or waits say so (vector
clocks). Memory is compared by byte, a view that is not contiguous counts with all between its first and last byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_Times = dict["Stream", int]


class RaceError(AssertionError):
    pass


class Event:
    def __init__(self) -> None:
        self.seen: _Times = {}

    def record(self, stream: Stream | None = None) -> None:
        self.seen = dict((stream or _Watch.current).seen)


class Stream:
    """seen: how many operations of each stream come before the next one of this stream."""

    def __init__(self, device: object = None) -> None:
        self.seen: _Times = {self: 0}

    def wait_event(self, event: Event) -> None:
        for stream, time in event.seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), time)

    def wait_stream(self, stream: Stream) -> None:
        event = Event()
        event.record(stream)
        self.wait_event(event)


class _Watch(TorchDispatchMode):
    current = Stream()

    def __init__(self) -> None:
        super().__init__()
        self._accesses: list[tuple[int, int, bool, Stream, int]] = []  # first byte, end, is written, stream, time
        self._kept: list[torch.Tensor] = []  # so that no address is given away twice

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in arguments)
        if not is_view:
            stream = _Watch.current
            stream.seen[stream] += 1
            for argument, value in zip(arguments, [*args, *([None] * len(arguments))]):
                given = kwargs.get(argument.name, value)
                if isinstance(given, torch.Tensor):
                    self._touch(given, argument.alias_info is not None and argument.alias_info.is_write, str(func))
        return func(*args, **kwargs)

    def _touch(self, tensor: torch.Tensor, is_written: bool, what: str) -> None:
        self._kept.append(tensor)
        first = tensor.data_ptr()
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1
        end, stream = first + span * tensor.element_size(), _Watch.current
        for other_first, other_end, was_written, other, time in self._accesses:
            is_shared = first < other_end and other_first < end and (is_written or was_written)
            if is_shared and stream.seen.get(other, 0) < time:
                raise RaceError(f"{what} does not wait for what another stream does with the same memory")
        self._accesses.append((first, end, is_written, stream, stream.seen[stream]))


@contextmanager
def _stream(stream: Stream) -> Iterator[None]:
    before, _Watch.current = _Watch.current, stream
    yield
    _Watch.current = before


@contextmanager
def watched() -> Iterator[None]:
    """Streams and events made and used here are checked; RaceError from the operation that does not wait."""
    _Watch.current = Stream()
    fakes = {"Stream": Stream, "Event": Event, "stream": _stream, "current_stream": lambda device=None: _Watch.current}
    with mock.patch.multiple(torch.cuda, **fakes), _Watch():
        yield
