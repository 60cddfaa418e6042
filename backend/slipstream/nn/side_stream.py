"""A second stream of a GPU, for small kernels that need nothing of the large one after them. Graphs capture both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """fork, work beside the current stream, join. Without a GPU the work is done in its place.

    Tensors need no record_stream: memory that the side stream freed is used again by its next work, which waits for
    all of the current stream before; memory of the current stream is not used again before the join.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def fork(self, x: Tensor) -> Iterator[None]:
        """What is done within begins after all that the current stream has to do so far."""
        if not x.is_cuda:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self, x: Tensor) -> None:
        """What the current stream does next begins after the work beside it."""
        if self._stream is not None:
            torch.cuda.current_stream(x.device).wait_stream(self._stream)
