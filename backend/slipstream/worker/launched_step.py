"""A step from its tensors to what it has sampled, while it is on the device. Engine thread."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from slipstream_kernels import ops

from slipstream.core.outputs import TokenLogprobs
from slipstream.nn.batch import ForwardBatch
from slipstream.worker.graph_shapes import GraphShape, PromptShape
from slipstream.worker.host_copy import HostCopy
from slipstream.worker.interface import StepInput, StepResult
from slipstream.worker.request_state import RequestState
from slipstream.worker.sample.sampler import PendingTokens


@dataclass(frozen=True)
class StepTensors:
    """graph: the shape of the CUDA graph whose tensors they are, padded to it; None: run eagerly.

    is_last_only: hidden states are computed of the rows that sample alone, by the graph of prompt_graph if any.
    """

    batch: ForwardBatch
    graph: GraphShape | None = None
    prompt_graph: PromptShape | None = None
    is_last_only: bool = False


@dataclass(frozen=True)
class ComputedRows:
    """What a step has computed and drawn, on the device alone: from the runner to heads that draft from it.

    hidden: [T, width of Decoder.forward]. next_ids: [T] int64, the token after each row: drawn or the prompt's next.
    last: [R] int64, of each request the last row that holds. kept: None if no request of the step had drafts.
    graph: whose static tensors all of these are; None: they are this step's own.

    Of a step with prompts hidden, next_ids and last are of the rows that sample alone, where no head reads all rows.
    """

    batch: ForwardBatch
    hidden: torch.Tensor
    next_ids: torch.Tensor
    last: torch.Tensor
    kept: ops.AcceptedRows | None
    graph: GraphShape | None = None


@dataclass(frozen=True)
class LaunchedSample:
    """What a step samples, on its way to the host. tokens: None if nothing is sampled.

    accepted: of a verification, a word of AcceptedRows per request. rows: of a verification, on the device.
    """

    tokens: PendingTokens | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    accepted: HostCopy | None = None
    rows: ComputedRows | None = None

    def result(self) -> StepResult:
        """Wait for the step, not for those launched since. Call it once."""
        if self.tokens is None:
            return StepResult([])
        accepted = None if self.accepted is None else self.accepted.lists()[0]  # first: it spins, tokens were before it
        sampled = self.tokens.result()
        return StepResult(sampled.token_ids, accepted, sampled.logprobs, self.prompt_logprobs)


@dataclass(frozen=True)
class RunningStep:
    """A step whose forward pass was launched. asks_prompt_logprobs: some request known to the worker does."""

    step: StepInput
    states: list[RequestState]
    tensors: StepTensors
    hidden: torch.Tensor
    asks_prompt_logprobs: bool = False
