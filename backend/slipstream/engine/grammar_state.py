"""The state of one sequence in its grammar. Engine thread; written by grammar_host.py, read by structured_output.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.core.errors import SlipstreamError
from slipstream.core.request import Request
from slipstream.core.sampling_params import Guide

if TYPE_CHECKING:
    from slipstream.engine.grammar_host import GrammarHost


@dataclass(slots=True, eq=False)
class GrammarState:
    """is_ready: the mask of the next token is in `row` of the matrix, masks of a walk's paths in the rows after it.
    error: why the sequence must end. is_slow: left out of steps until ready. is_terminated: the text is complete and
    there is no end token to sample."""

    guide: Guide
    end_token_ids: list[int]
    request: Request
    host: GrammarHost | None = None
    token_ids: list[int] = field(default_factory=list)  # accepted
    is_ready: bool = False
    is_slow: bool = False
    is_terminated: bool = False
    error: SlipstreamError | None = None
    key: bytes = b""
    state_id: int = 0
    row: int = -1
    is_open: bool = False  # in the worker
    num_sent: int = 0  # of token_ids, to the worker
    asked_at: float = 0.0  # time.monotonic() of the pending job, or 0
    asked_s: float = 0.0  # time limit of that job
    wants_walk: bool = False
    has_walked: bool = False
    dead: tuple[int, ...] = ()  # indices of the last walk's paths that the grammar forbids
    cpu_s: float = 0.0  # for its tokens
    walk_cpu_s: float = 0.0  # for drafts
    num_quick: int = 0
    num_kills: int = 0  # processes killed from outside while it waited, since its last token
    num_crashes: int = 0  # worker crashes that it may have caused, since its last token
    num_tokens_at_death: int = -1

    @property
    def is_settled(self) -> bool:
        """Whether no call is pending."""
        return self.error is not None or self.is_terminated or (self.is_ready and self.has_walked >= self.wants_walk)
