"""Logits processors as an operator might write them, for tests. Copied beside the model that names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from slipstream.processors import ProcessorContext, ProcessorRow


class Force:
    """Only the token `token` may follow. Raises for a negative one, and where `fail_after` tokens are out."""

    num_calls = 0

    def __init__(self, context: ProcessorContext) -> None:
        self.vocab_size = context.vocab_size

    @staticmethod
    def validate(kwargs: Mapping[str, Any]) -> None:
        if "token" not in kwargs:
            raise ValueError("`token` is missing")

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> torch.Tensor:
        Force.num_calls += 1
        forced = torch.full_like(logits, -torch.inf)
        for index, row in enumerate(rows):
            if len(row.output_token_ids) >= row.kwargs.get("fail_after", 1 << 30):
                raise RuntimeError(f"tells of {row.prompt_token_ids}")
            forced[index, row.kwargs["token"]] = 0.0
        return forced


class Numbers:
    """Fills its rows with `value`: "nan", "inf", "-inf", or changes their shape."""

    def __init__(self, context: ProcessorContext) -> None: ...

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> torch.Tensor | None:
        if rows[0].kwargs["value"] == "shape":
            return logits[:, :-1]
        logits.fill_(float(rows[0].kwargs["value"]))
        return None


class Never:
    """The token `token` is not said, and a text that has it is an error, as in many a state machine."""

    def __init__(self, context: ProcessorContext) -> None: ...

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> None:
        for index, row in enumerate(rows):
            if row.kwargs["token"] in row.output_token_ids:
                raise KeyError(row.kwargs["token"])
            logits[index, row.kwargs["token"]] = -torch.inf


class Recorder:
    """Changes nothing; keeps what it has seen."""

    seen: ClassVar[list[tuple[list[int], list[int]]]] = []

    def __init__(self, context: ProcessorContext) -> None: ...

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> None:
        Recorder.seen += [(list(row.prompt_token_ids), row.output_token_ids) for row in rows]


class Roll:
    """Each token has the logit of another one."""

    def __init__(self, context: ProcessorContext) -> None: ...

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> torch.Tensor:
        return logits.roll(7, dims=1)


class Unmade:
    def __init__(self, context: ProcessorContext) -> None:
        raise OSError("no such list of words")

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> None: ...


class NoProcessor:
    pass
