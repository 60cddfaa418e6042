"""The state of a step on the device, from its tensors to its sampled tokens. Engine thread.

What every step makes is not frozen, though nobody changes it: a frozen one takes eight times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slipstream_kernels import ops

from slipstream.nn.batch import ForwardBatch
from slipstream.worker.graph_shapes import GraphShape, PromptShape
from slipstream.worker.host_copy import HostCopy
from slipstream.worker.interface import StepInput, StepResult
from slipstream.worker.request_state import RequestState
from slipstream.worker.sample.logprobs import NO_PROMPTS, TakenPrompts
from slipstream.worker.sample.sampler import PendingTokens


@dataclass(slots=True)
class StepTensors:
    """graph: the shape of the CUDA graph that the tensors belong to and are padded to; None: the step runs eagerly.

    prompt_graph: of a step with prompts. is_last_only: the last layer computes only the sampled rows, and the tensors
    are the graph's; else it computes all rows, of which num_decodes lie before the prompts, and the tensors are the
    step's own.
    has_adapters: some rows have one, perhaps in the graph adapter_graph.
    is_drawn: the graph draws a token of each request, as if nothing edited its logits.
    """

    batch: ForwardBatch
    graph: GraphShape | None = None
    prompt_graph: PromptShape | None = None
    is_last_only: bool = False
    num_decodes: int = 0
    has_adapters: bool = False
    adapter_graph: GraphShape | None = None
    is_drawn: bool = False

    @property
    def has_graph(self) -> bool:
        """Whether a graph runs the step, and completes its own tensors."""
        return not (self.graph is None and self.prompt_graph is None and self.adapter_graph is None)

    @property
    def has_own_batch(self) -> bool:
        """Whether the batch is made for this step, and not the tensors of a graph."""
        return not self.has_graph or (self.prompt_graph is not None and not self.is_last_only)


@dataclass(slots=True)
class ComputedRows:
    """A step's hidden states and tokens on the device, the input of draft heads.

    hidden: [T, width of Decoder.forward]. next_ids: [T] int64, the token after each row: sampled or the prompt's next.
    last: [R] int64, each request's last accepted row. accepted: None if no request of the step had drafts.
    graph: the CUDA graph that these static tensors belong to; None: they are this step's own.

    In a step with prompts hidden, next_ids and last cover only the sampled rows, unless a head reads all rows.
    """

    batch: ForwardBatch
    hidden: torch.Tensor
    next_ids: torch.Tensor
    last: torch.Tensor
    accepted: ops.AcceptedRows | None
    graph: GraphShape | None = None


@dataclass(slots=True)
class LaunchedSample:
    """The sampled tokens of a launched step, being copied to the host. tokens: None if nothing is sampled.

    accepted: of a verification: per request the bit mask of accepted rows. rows: of a verification, on the device.
    """

    tokens: PendingTokens | None = None
    prompts: TakenPrompts = NO_PROMPTS
    accepted: HostCopy | None = None
    rows: ComputedRows | None = None

    def result(self, before: PendingTokens | None = None) -> StepResult:
        """Wait for the step, but not for those launched after it. Call it once. before: of the last step that was read
        and had any, since whose end its device's time is taken."""
        if self.tokens is None:
            return StepResult([])
        accepted = None if self.accepted is None else self.accepted.lists()[0]  # first: it spins, tokens were before it
        sampled = self.tokens.result()
        logprobs, prompts = sampled.logprobs, self.prompts
        device_s = None if before is None else self.tokens.seconds_since(before)
        return StepResult(
            sampled.token_ids, accepted, logprobs, prompts.logprobs, prompts.logits, self.tokens.processors, device_s
        )


@dataclass(slots=True)
class RunningStep:
    """A step whose forward pass is launched. asks_prompt_logprobs: a known request wants prompt log-probabilities.
    all_plain: all known requests are plain."""

    step: StepInput
    states: list[RequestState]
    tensors: StepTensors
    hidden: torch.Tensor
    asks_prompt_logprobs: bool = False
    all_plain: bool = False
