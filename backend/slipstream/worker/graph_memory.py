"""What CUDA graphs keep on the device, for the memory plan, and the sizes of their inputs. Pure arithmetic.

All graphs of a rank share one memory pool for the activations of a step, and for the logits of decodes. Each set of
graphs has inputs of its own, and each graph keeps its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.core.config import EngineConfig
from slipstream.nn.parallel import Parallel
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.block_tables import table_width
from slipstream.worker.graph_shapes import StepShape, graph_shapes, graph_sizes, layer_shapes, prompt_shapes
from slipstream.worker.request_state import DRAW_ROW

if TYPE_CHECKING:
    from slipstream.worker.hardware import Hardware


@dataclass(frozen=True)
class InputSizes:
    """Sizes of the static tensors that graphs of these shapes read. num_columns: 64-bit values per token."""

    num_tokens: int
    num_requests: int
    num_columns: int
    tables_bytes: int  # of the block tables of all KV groups

    @classmethod
    def of(cls, shapes: Sequence[StepShape], max_blocks: int, num_groups: int) -> InputSizes:
        """max_blocks: width of a block table."""
        num_requests = max((shape.num_requests for shape in shapes), default=0)
        return cls(
            num_tokens=max((shape.num_tokens for shape in shapes), default=0),
            num_requests=num_requests,
            # token, position, row to sample, tree mask, where a drawn token lies; a slot of each group
            num_columns=5 + num_groups,
            tables_bytes=num_groups * num_requests * max_blocks * 4,
        )

    @property
    def num_words(self) -> int:
        return self.num_columns * self.num_tokens

    @property
    def fixed_bytes(self) -> int:
        """What one copy brings without block tables; starts, lengths and the tables' size have 32 bits."""
        return self.num_words * 8 + (2 * self.num_requests + 3) * 4

    @property
    def arriving_bytes(self) -> int:
        """All that one copy brings."""
        return self.fixed_bytes + self.tables_bytes

    @property
    def total_bytes(self) -> int:
        """With the tables as the graphs read them, which are wider than what arrives."""
        return self.arriving_bytes + self.tables_bytes


@dataclass(frozen=True)
class GraphMemory:
    """num_tokens: of the largest graph, whose activations stay allocated. held_bytes: inputs and outputs of all
    graphs."""

    num_tokens: int = 0
    held_bytes: int = 0


def num_graph_sets(parallel: Parallel) -> int:
    """Sets of graphs that a rank captures: the first of several stages has one for each step under way, one per stage,
    because it reads a step's tensors again when the step returns."""
    return parallel.num_stages if parallel.stage == 0 else 1


def graph_memory(spec: DecoderSpec, config: EngineConfig, hardware: Hardware, num_groups: int = 1) -> GraphMemory:
    """As the model runner captures them, without graphs of verifications and drafting heads, whose shapes only the
    drafters' files say, and without those of steps with adapters. Shapes that it drops at start are counted."""
    parallel, scheduler = hardware.parallel, config.scheduler
    has_stages = parallel.num_stages > 1
    if has_stages and config.speculation.loaded:
        return GraphMemory()  # steps of stages with drafts are not captured
    wanted, most = config.model.cuda_graphs, scheduler.max_num_seqs
    sizes = graph_sizes(wanted, most, hardware.device, has_experts=spec.has_experts)
    if not sizes:
        return GraphMemory()
    max_model_len = config.model.max_model_len or spec.max_model_len
    max_blocks = table_width(max_model_len, config.cache.block_size)
    decodes, num_sets = graph_shapes(sizes), num_graph_sets(parallel)
    largest = max(shape.num_tokens for shape in decodes)
    inputs = num_sets * InputSizes.of(decodes, max_blocks, num_groups).total_bytes
    inputs += 8 * max(largest, most) + DRAW_ROW.itemsize * max(*sizes, most)  # drawn tokens, and by what they are drawn
    num_rows = num_sets * sum(shape.num_tokens for shape in decodes)
    if parallel.stage:
        num_rows += largest  # what has arrived from the stage before
    if not has_stages:
        prompts = prompt_shapes(sizes, min(scheduler.max_num_batched_tokens, max_model_len))
        largest = max(largest, *(shape.num_tokens for shape in prompts))
        inputs += InputSizes.of(prompts, max_blocks, num_groups).total_bytes
        num_rows += sum(shape.num_logits for shape in prompts)
        if layers := layer_shapes(sizes, spec, max_model_len):
            inputs += InputSizes.of(layers, max_blocks, num_groups).total_bytes
            num_rows += 2 * layers[0].num_tokens
    held_bytes = inputs + num_rows * spec.hidden_size * hardware.dtype.itemsize
    if parallel.num_ranks == 1:
        is_scaled = spec.logit_scale != 1.0 or spec.logit_soft_cap is not None  # a second tensor, in fp32
        held_bytes += max(sizes) * spec.vocab_size * (hardware.dtype.itemsize + 4 * is_scaled)
    return GraphMemory(largest, held_bytes)
