"""One engine step as the scheduler orders it: plain data for worker/input_batch.py. Engine thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.core.host_cache import BlockCopies
from slipstream.core.request import Request


@dataclass(slots=True)
class ScheduledRequest:
    """Rows of one request: num_scheduled_tokens of token_ids + draft_token_ids, from num_computed_tokens on.

    A row past both is the token that the step before this one samples, which only the device knows.
    samples: the rows reach the request's last token, so the step must sample for it. The last num_drafts rows are
    drafts, which it must verify.
    """

    request: Request
    num_computed_tokens: int
    num_scheduled_tokens: int
    samples: bool
    num_drafts: int = 0


@dataclass(slots=True)
class ScheduledStep:
    """requests: decodes first, then prefills. Empty when nothing can run. preempted: lost their blocks just now.

    copies: between device and host memory, to be made before the step computes.
    """

    requests: list[ScheduledRequest] = field(default_factory=list)
    num_scheduled_tokens: int = 0
    preempted: list[Request] = field(default_factory=list)
    copies: BlockCopies = field(default_factory=BlockCopies)
