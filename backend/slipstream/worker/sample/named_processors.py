"""Runs the operator's logits processors on the rows of the requests that ask for them. Engine thread.

A class is called once a step for all its rows. If it raises, it is called again for each request by itself, so that
only those fail whose own rows it cannot take, and then for each row: a text that only drafts lead to fails nobody.
Whatever a class does to its rows, other rows stay as they are, and its own become finite numbers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from slipstream.core.config import EngineConfig, ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.core.logits_processors import PARAMETER, load_classes
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.hardware import Hardware
from slipstream.worker.host_copy import to_device
from slipstream.worker.interface import ProcessorReport
from slipstream.worker.request_state import RequestState
from slipstream.worker.sample.penalties import Paths

logger = logging.getLogger(__name__)

LARGEST = 1e28  # either way: finite divided by any temperature, and no token that is banned outweighs another one
_SLOW_S, _WARNING_PERIOD_S = 0.1, 60.0


@dataclass(frozen=True)
class ProcessorContext:
    """What a class is made with. vocab_size: the width of the logits. tokenizer: its folder or file."""

    vocab_size: int
    device: torch.device
    tokenizer: str = ""


@dataclass(frozen=True, slots=True)
class ProcessorRow:
    """A row of the logits: its request's arguments, and the tokens before it. None of them is to be changed.

    path: drafts after the request's own tokens, for rows that verify drafts.
    """

    kwargs: Mapping[str, Any]
    request: RequestState
    path: tuple[int, ...] = ()

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self.request.prompt_token_ids

    @property
    def output_token_ids(self) -> list[int]:
        return [*self.request.token_ids[self.request.num_prompt_tokens :], *self.path]


class LogitsProcessor(Protocol):
    """What the operator writes. Made once, with the model. A class may also have a static method `validate(kwargs)`,
    which raises ValueError for arguments that it does not take."""

    def __init__(self, context: ProcessorContext) -> None: ...

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> torch.Tensor | None:
        """logits: [len(rows), vocab_size] fp32, a copy that may be changed in place. Returns what counts instead, of
        the same shape, or None for the changed copy."""
        ...


@dataclass(slots=True)
class _Called:
    """The calls of one processor in a composition: rows of the step, in order."""

    name: str
    processor: LogitsProcessor
    rows: list[int] = field(default_factory=list)
    kwargs: list[Mapping[str, Any]] = field(default_factory=list)


def make_processors(config: ModelConfig, context: ProcessorContext) -> dict[str, LogitsProcessor]:
    """The processors of a model by name, in the parameter's order. Raises ConfigError."""
    made: dict[str, LogitsProcessor] = {}
    for name, kind in load_classes(config.logits_processors, config.logits_processor_folders).items():
        try:
            made[name] = kind(context)
        except Exception as error:  # the operator's code may raise anything
            reason = f"cannot be made: {type(error).__name__}: {error}"
            raise ConfigError(PARAMETER, name, reason) from error
    return made


def processors_of(config: EngineConfig, spec: DecoderSpec, hardware: Hardware) -> dict[str, LogitsProcessor]:
    """Those of the first rank, whose tokens all ranks have. Raises ConfigError."""
    if hardware.parallel.number:
        return {}
    tokenizer = config.model.tokenizer or config.model.model
    return make_processors(config.model, ProcessorContext(spec.vocab_size, hardware.device, tokenizer))


class NamedProcessors:
    """One per sampler. processors: by name, in the order in which they change a row; only the first rank has any.

    Rows come in the order of requests; a request's rows are consecutive.
    """

    def __init__(self, processors: Mapping[str, LogitsProcessor], device: torch.device) -> None:
        self._processors = processors
        self._device = device
        self._called: list[_Called] = []
        self._warned_at: dict[str, float] = {}

    def compose(self, requests: list[RequestState]) -> None:
        """Set the requests of the following steps, in row order."""
        if not self._processors:
            return
        called = {name: _Called(name, processor) for name, processor in self._processors.items()}
        for row, request in enumerate(requests):
            for call in request.params.logits_processors:
                if (one := called.get(call.name)) is not None:
                    one.rows.append(row)
                    one.kwargs.append(call.kwargs)
        self._called = [one for one in called.values() if one.rows]

    def apply(self, logits: torch.Tensor, requests: list[RequestState], paths: Paths | None) -> ProcessorReport:
        """Change logits in place: [num_rows, vocab] fp32. requests: those of the last `compose`."""
        start = time.perf_counter()
        failures: dict[int, str] = {}
        dead_rows: list[int] = []
        for one in self._called:
            began = time.perf_counter()
            rows = [
                ProcessorRow(kwargs, requests[row], paths[row] if paths else ())
                for row, kwargs in zip(one.rows, one.kwargs)
            ]
            self._run(one, logits, rows, failures, dead_rows)
            self._warn_if_slow(one, time.perf_counter() - began)
        return ProcessorReport(time.perf_counter() - start, failures, dead_rows)

    def _run(
        self,
        one: _Called,
        logits: torch.Tensor,
        rows: list[ProcessorRow],
        failures: dict[int, str],
        dead_rows: list[int],
    ) -> None:
        failed = self._try(one, logits, rows, range(len(rows)))
        if failed is None:
            return
        by_request: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            by_request.setdefault(row.request.sequence_id, []).append(index)
        for sequence_id, indices in by_request.items():
            error = failed if len(indices) == len(rows) else self._try(one, logits, rows, indices)
            if error is not None and len(indices) > 1:
                error = self._run_each(one, logits, rows, indices, dead_rows)
            if error is not None:
                self._fail(one, sequence_id, error, failures)

    def _run_each(
        self, one: _Called, logits: torch.Tensor, rows: list[ProcessorRow], indices: list[int], dead_rows: list[int]
    ) -> Exception | None:
        """The rows of one request by themselves. Returns the error of its last token's row, behind which there is no
        other text. Rows of drafts that fail are added to dead_rows: without drafts their text might never come."""
        dead: set[tuple[int, ...]] = set()
        for index in indices:
            path = rows[index].path
            error = None if path[:-1] in dead else self._try(one, logits, rows, [index])
            if error is None and path[:-1] not in dead:
                continue
            if not path:
                return error
            dead.add(path)
            dead_rows.append(one.rows[index])
        return None

    def _try(
        self, one: _Called, logits: torch.Tensor, rows: list[ProcessorRow], indices: Sequence[int]
    ) -> Exception | None:
        """Returns what it raises: the operator's code may raise anything, which must not end the step."""
        try:
            self._call(one, logits, rows, indices)
        except Exception as error:
            return error
        return None

    def _call(self, one: _Called, logits: torch.Tensor, rows: list[ProcessorRow], indices: Sequence[int]) -> None:
        row_of = to_device([one.rows[index] for index in indices], torch.int64, self._device)
        own = logits[row_of]  # a copy
        edited = one.processor.apply(own, [rows[index] for index in indices])
        edited = own if edited is None else edited
        if not isinstance(edited, torch.Tensor) or edited.shape != (len(indices), logits.shape[1]):
            raise TypeError(f"`apply` has to return a tensor of shape {[len(indices), logits.shape[1]]}, or None")
        edited = edited.to(logits).nan_to_num(-LARGEST, LARGEST, -LARGEST).clamp_(-LARGEST, LARGEST)
        logits[row_of] = edited

    def _fail(self, one: _Called, sequence_id: int, error: Exception, failures: dict[int, str]) -> None:
        """The reason is for the log: it may tell of other requests."""
        logger.error("logits processor %s failed", one.name, exc_info=error)
        failures.setdefault(sequence_id, f"the logits processor {one.name} failed: {type(error).__name__}")

    def _warn_if_slow(self, one: _Called, seconds: float) -> None:
        if seconds < _SLOW_S:
            return
        now = time.monotonic()
        if now - self._warned_at.get(one.name, -_WARNING_PERIOD_S) >= _WARNING_PERIOD_S:
            self._warned_at[one.name] = now
            text = "logits processor %s took %.0f ms for %d rows; every request of the step waited"
            logger.warning(text, one.name, 1e3 * seconds, len(one.rows))
