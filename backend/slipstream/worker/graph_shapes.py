"""The capacities of CUDA graphs, and which graphs are made; cuda_graphs.py captures and replays them. Arrays only.

A decode graph runs every step of short queries that fits: decodes, verifications, short prompts. A prompt graph has a
capacity of decodes and, after them, of prompts: their attention is two kernels over different rows. Its last layer
computes only the sampled rows, unless heads read all.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Protocol

import numpy as np
import torch

from slipstream.core.errors import ConfigError
from slipstream.core.prefill_budget import MIN_CHUNK, may_be_layered
from slipstream.nn.batch import MAX_DECODE_QUERY_LEN
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.input_batch import StepArrays

logger = logging.getLogger(__name__)

# Tokens of the largest graph with several tokens per request: above, GEMMs take longer than their launches.
MAX_DECODE_ROWS = 512
# Numbers of requests to capture for: up to 16 apart to 128, 32 to 256, 64 to 512, then 128. A padding row costs little.
DEFAULT_SIZES = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512),
    *(640, 768, 896, 1024),
)
# Padding rows choose experts, too, whose weights are read for nobody: of 64, 5 rows of 6 experts each have about 25,
# and three equal rows of padding add 4.
SIZES_OF_EXPERTS = tuple(sorted({*DEFAULT_SIZES, 3, 5, 6, 7, 12, 20}))
# Tokens of the smallest graph for steps with short prompts.
MIN_PROMPT_TOKENS = 16
# A larger graph replaces a smaller one if it takes less than this share of its time.
LEAST_GAIN = 0.95
# Tokens of the largest prompt graph. Graphs whose kernels take longer than their launches are dropped at start.
MAX_TOKENS = 2560
# A step is padded to the next multiple: whole tiles of products.
TOKEN_STEP = 128
# Beyond so many tokens graphs are twice TOKEN_STEP apart and of fewer capacities, so that the start stays short.
LARGE_TOKENS = 1280
MAX_PROMPTS = 64
DECODE_CAPACITIES, LARGE_CAPACITIES = (0, 32, 128, 256, 512), (0, 128, 512)


class StepShape(Protocol):
    """The capacity of a graph, and the layout of a step in it."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def max_query_len(self) -> int: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def is_tree(self) -> bool: ...
    @property
    def num_decodes(self) -> int: ...
    @property
    def num_decode_tokens(self) -> int: ...
    @property
    def max_decode_query_len(self) -> int: ...
    @property
    def num_logits(self) -> int:
        """Number of logits_indices that the forward pass reads."""
        ...

    @property
    def at_start(self) -> bool:
        """Whether its graph is captured at start in any case: only tokens of decodes wait for its steps."""
        ...

    def holds(self, step: StepArrays) -> bool: ...

    def spread(self, step: StepArrays) -> StepArrays:
        """The step as it lies in the graph's tensors, but for padding behind it."""
        ...


@dataclass(frozen=True, order=True)
class GraphShape:
    """The capacity of a decode graph. max_query_len: tokens of one request. is_tree: drafts may be trees."""

    num_tokens: int
    max_query_len: int
    num_requests: int
    is_tree: bool = False

    @property
    def is_verification(self) -> bool:
        """Whether it is made for drafts; short prompts may fit too."""
        return self.is_tree or 1 < self.max_query_len < MAX_DECODE_QUERY_LEN

    def holds(self, step: StepArrays) -> bool:
        """Whether a step fits. Prompts of more than MAX_DECODE_QUERY_LEN tokens never do: they need a PromptShape."""
        return (
            len(step.token_ids) <= self.num_tokens
            and len(step.seq_lens) <= self.num_requests
            and step.max_query_len <= self.max_query_len
            and step.num_decode_requests == len(step.seq_lens)
            and (self.is_tree or step.tree_mask is None)
        )

    def covers(self, other: GraphShape) -> bool:
        """Whether every step that fits `other` fits this shape."""
        sides = zip(astuple(self), astuple(other))
        return all(own >= its for own, its in sides)

    @property
    def num_decodes(self) -> int:
        return self.num_requests

    @property
    def num_decode_tokens(self) -> int:
        return self.num_tokens

    @property
    def max_decode_query_len(self) -> int:
        return self.max_query_len

    @property
    def num_logits(self) -> int:
        return 1

    @property
    def at_start(self) -> bool:
        return self.max_query_len == 1 or self.is_verification

    def spread(self, step: StepArrays) -> StepArrays:
        return step


def graph_sizes(
    wanted: str, max_num_seqs: int, device: torch.device, refusal: str | None = None, has_experts: bool = False
) -> tuple[int, ...]:
    """Numbers of requests to capture for, ascending; none on a CPU. wanted: "auto", "off" or a list like "1,2,4".

    refusal: why this model's steps cannot be captured, or None. With one, "auto" gives none and a list raises
    ConfigError. has_experts: whether the model's layers have.
    """
    if wanted == "off" or device.type != "cuda":
        return ()
    if refusal is not None:
        if wanted != "auto":
            raise ConfigError("cuda_graphs", wanted, f"accepted: auto or off, because {refusal}")
        logger.warning("no CUDA graphs: %s", refusal)
        return ()
    if wanted != "auto":
        return tuple(sorted({int(size) for size in wanted.split(",")}))
    largest = min(max_num_seqs, DEFAULT_SIZES[-1])
    sizes = SIZES_OF_EXPERTS if has_experts else DEFAULT_SIZES
    return (*(size for size in sizes if size < largest), largest)


@dataclass(frozen=True)
class DraftLayout:
    """num_drafts: maximum per request, 0 without speculation. has_trees: drafts may be trees. are_ragged: requests of a
    step may have different numbers of drafts. reads_all_rows: a head reads the hidden states of all prompt tokens.
    follows_prompts: see DrafterInfo. num_scratch_slots: most that a head writes behind a request's rows."""

    num_drafts: int = 0
    has_trees: bool = False
    are_ragged: bool = True
    reads_all_rows: bool = False
    follows_prompts: bool = False
    num_scratch_slots: int = 0


NO_DRAFTS = DraftLayout()


def graph_shapes(sizes: Sequence[int], drafts: DraftLayout = NO_DRAFTS) -> list[GraphShape]:
    """Shapes for these numbers of requests, ascending: of decodes, verifications, and steps with short prompts."""
    num_drafts = drafts.num_drafts
    shapes = {GraphShape(size, 1, size) for size in sizes}
    lengths = {1 + num_drafts, *(length for length in (2, 4, 8, 16, 32) if length <= num_drafts)} if num_drafts else ()
    for size in sizes:
        for length in lengths:  # an average, if ragged
            if size * length <= MAX_DECODE_ROWS:
                longest = 1 + num_drafts if drafts.are_ragged else length
                shapes.add(GraphShape(size * length, longest, size, drafts.has_trees))
    for size in _thinned(sizes):
        num_tokens = MIN_PROMPT_TOKENS
        while num_tokens <= min(MAX_DECODE_ROWS, size * MAX_DECODE_QUERY_LEN):
            if num_tokens > size:
                shapes.add(GraphShape(num_tokens, MAX_DECODE_QUERY_LEN, size))
            num_tokens *= 2
    return sorted(shapes)


def slower_than_larger(seconds: Mapping[GraphShape, float]) -> list[GraphShape]:
    """Verification shapes that a larger graph runs faster. On one H200 448 rows took 15.7 ms and 512 rows 11.8 ms,
    because a library chose a slow GEMM kernel."""
    return [
        shape
        for shape, took in seconds.items()
        if shape.is_verification
        and any(less < LEAST_GAIN * took and larger.covers(shape) for larger, less in seconds.items())
    ]


def _thinned(sizes: Sequence[int]) -> list[int]:
    """A subset of the sizes: each at least four times the one before, and the largest."""
    kept: list[int] = []
    for size in sizes:
        if not kept or size >= 4 * kept[-1] or size == sizes[-1]:
            kept.append(size)
    return kept


@dataclass(frozen=True, order=True)
class PromptShape:
    """The capacity of a prompt graph. num_tokens: in all; the first num_decodes are for requests of one token."""

    num_tokens: int
    num_decodes: int
    num_prompts: int = MAX_PROMPTS

    @property
    def num_requests(self) -> int:
        return self.num_decodes + self.num_prompts

    @property
    def max_query_len(self) -> int:
        return self.num_tokens - self.num_decodes

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decodes

    @property
    def max_decode_query_len(self) -> int:
        return min(1, self.num_decodes)

    @property
    def num_logits(self) -> int:
        return self.num_requests

    @property
    def is_tree(self) -> bool:
        return False

    @property
    def at_start(self) -> bool:
        return False

    def holds(self, step: StepArrays) -> bool:
        """Whether a step fits. Steps with drafts never do: here a request samples one token at most."""
        if len(step.token_ids) > self.num_tokens or step.tree_mask is not None:
            return False
        num_decodes, num_requests = num_singles(step), len(step.seq_lens)
        return (
            num_decodes <= self.num_decodes
            and 0 < num_requests - num_decodes <= self.num_prompts
            and len(step.token_ids) - num_decodes <= self.max_query_len
            and len(step.logits_indices) <= num_requests
            and all(place < num_decodes for place in step.pending.places[-1:])
        )

    def spread(self, step: StepArrays) -> StepArrays:
        """Insert padding requests, which read and write nothing, between the step's decodes and its prompts."""
        first = num_singles(step)
        gap = self.num_decodes - first
        if not gap:
            return step
        starts, tables = step.query_start_loc, step.block_tables
        filled = first + np.arange(1, gap + 1, dtype=starts.dtype)
        return replace(
            step,
            token_ids=_parted(step.token_ids, first, gap),
            positions=_parted(step.positions, first, gap),
            slot_mapping=_parted(step.slot_mapping, first, gap, -1),
            query_start_loc=np.concatenate([starts[: first + 1], filled, starts[first + 1 :] + gap]),
            seq_lens=_parted(step.seq_lens, first, gap),
            block_tables=_parted(tables, first, gap),
            other_tables=_parted_groups(step.other_tables, first, gap),
            other_slots=_parted_groups(step.other_slots, first, gap, -1),
            logits_indices=step.logits_indices + gap * (step.logits_indices >= first),
        )

    def gather(self, rows: torch.Tensor, num_decodes: int, num_tokens: int) -> torch.Tensor:
        """rows: the output of such a graph. Returns those of a step with so many decodes and tokens, which `spread` has
        moved apart."""
        gap = self.num_decodes - num_decodes
        if not gap:
            return rows[:num_tokens]
        return torch.cat([rows[:num_decodes], rows[self.num_decodes : num_tokens + gap]])


@dataclass(frozen=True, order=True)
class LayerShape(PromptShape):
    """One layer of a prompt's chunk that goes through some layers in each step."""

    layer: int = 0


def layer_shapes(decode_sizes: Sequence[int], spec: DecoderSpec, max_model_len: int) -> list[LayerShape]:
    """The graphs of single layers, beside decode graphs of these sizes; none where no prompt goes layer by layer."""
    if not (decode_sizes and may_be_layered(max_model_len, spec.attention_parity)):
        return []
    return [LayerShape(MIN_CHUNK, 0, 1, layer) for layer in range(spec.num_layers)]


def prompt_shapes(decode_sizes: Sequence[int], max_num_tokens: int) -> list[PromptShape]:
    """Shapes of prompt graphs beside decode graphs of these sizes, ascending; none if there are no decode graphs."""
    if not decode_sizes:
        return []
    most, found = max(decode_sizes), []
    for size in prompt_sizes(max_num_tokens):
        capacities = DECODE_CAPACITIES if size <= LARGE_TOKENS else LARGE_CAPACITIES
        decodes = {min(capacity, most) for capacity in capacities}
        found += [PromptShape(size, capacity) for capacity in decodes if capacity < size]
    return sorted(found)


def prompt_sizes(max_num_tokens: int) -> list[int]:
    """Tokens of prompt graphs, ascending: up to the first that holds max_num_tokens, the largest step."""
    small = range(TOKEN_STEP, LARGE_TOKENS + 1, TOKEN_STEP)
    large = range(LARGE_TOKENS + 2 * TOKEN_STEP, MAX_TOKENS + 1, 2 * TOKEN_STEP)
    return [size for sizes in (small, large) for size in sizes if size - sizes.step < max_num_tokens]


def num_singles(step: StepArrays) -> int:
    """Number of leading requests with one token."""
    is_longer = np.diff(step.query_start_loc) > 1
    return int(is_longer.argmax()) if is_longer.any() else len(is_longer)


def _parted(values: np.ndarray, first: int, gap: int, padding: int = 0) -> np.ndarray:
    filled = np.full((gap, *values.shape[1:]), padding, dtype=values.dtype)
    return np.concatenate([values[:first], filled, values[first:]])


def _parted_groups(values: np.ndarray | None, first: int, gap: int, padding: int = 0) -> np.ndarray | None:
    return None if values is None else np.stack([_parted(group, first, gap, padding) for group in values])
