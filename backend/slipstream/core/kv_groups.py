"""KV cache groups: the layers that hold the same tokens share one block table. Plain data and its arithmetic.

A model with full and sliding-window layers has groups of both kinds, with the same number of layers each, so that a
block of one pool serves any group. A windowed group releases the blocks that its window has passed.
Source: the hybrid KV cache manager of vLLM v1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

GROUP_SIZE_RATIO = 1.25  # kinds whose numbers of layers differ by less become one group each: the smaller one is padded


@dataclass(frozen=True, slots=True)
class KVGroups:
    """Groups 0..num_full-1 hold all tokens; the num_windowed after them hold the latest ones.

    num_kept_tokens: tokens before the next one to compute that a windowed group must hold. max_step_tokens: most slots
    after these that a request uses before its window moves (a chunk of a prompt, drafts). of_layers: the group of each
    layer; empty: all are in group 0.
    """

    num_full: int = 1
    num_windowed: int = 0
    num_kept_tokens: int = 0
    max_step_tokens: int = 0
    of_layers: tuple[int, ...] = ()

    @property
    def num_groups(self) -> int:
        return self.num_full + self.num_windowed

    def layers_of(self, group: int) -> list[int]:
        return [layer for layer, other in enumerate(self.of_layers) if other == group]

    @property
    def parts(self) -> list[int]:
        """The part of a block that each layer uses: its place in its group."""
        return [self.of_layers[:layer].count(group) for layer, group in enumerate(self.of_layers)]

    @property
    def num_parts(self) -> int:
        """Layers of the largest group."""
        return 1 + max(self.parts)

    def within(self, layers: range) -> KVGroups:
        """The same groups of these layers only; a group may be left without any."""
        return replace(self, of_layers=self.of_layers[layers.start : layers.stop])

    def first_kept_block(self, num_computed_tokens: int, block_size: int) -> int:
        """The first block of a windowed group that steps from num_computed_tokens on may read."""
        return max(0, num_computed_tokens - self.num_kept_tokens) // block_size

    def max_window_blocks(self, block_size: int) -> int:
        """Most blocks that a request holds in one windowed group: its window and a step, at any offset."""
        return _blocks_across(self.num_kept_tokens + self.max_step_tokens, block_size)

    def max_blocks(self, num_tokens: int, block_size: int) -> int:
        """Most blocks that a request holds at once while it grows to num_tokens."""
        num_blocks = -(-num_tokens // block_size)
        if not self.num_windowed:
            return self.num_full * num_blocks
        return self.num_full * num_blocks + self.num_windowed * min(num_blocks, self.max_window_blocks(block_size))

    def decode_blocks(self, num_tokens: int, block_size: int) -> int:
        """Blocks that a request of num_tokens holds while it decodes one token a step."""
        num_blocks = -(-num_tokens // block_size)
        num_window = min(num_blocks, _blocks_across(self.num_kept_tokens + 1, block_size))
        return self.num_full * num_blocks + self.num_windowed * num_window

    def max_tokens(self, num_blocks: int, block_size: int) -> int:
        """The longest request (tokens) whose max_blocks are at most num_blocks."""
        longest = num_blocks // self.num_groups
        if self.num_windowed and longest >= (most := self.max_window_blocks(block_size)):
            longest = (num_blocks - self.num_windowed * most) // self.num_full
        return longest * block_size


ONE_GROUP = KVGroups()


def group_layers(windows: Sequence[int | None]) -> tuple[int, int, tuple[int, ...]]:
    """num_full, num_windowed and the group of each layer. windows: of the layers in tokens, None holds all.

    Both kinds must occur. The layers of a group are the fewer kind's number, so that few parts of a block stay unused.
    """
    full = [layer for layer, window in enumerate(windows) if window is None]
    windowed = [layer for layer, window in enumerate(windows) if window is not None]
    fewer, more = sorted((len(full), len(windowed)))
    assert fewer > 0, "layers of one kind are one group"
    size = more if more < GROUP_SIZE_RATIO * fewer else fewer
    num_full = -(-len(full) // size)
    groups = [0] * len(windows)
    for place, layer in enumerate(full):
        groups[layer] = place // size
    for place, layer in enumerate(windowed):
        groups[layer] = num_full + place // size
    return num_full, -(-len(windowed) // size), tuple(groups)


def _blocks_across(num_tokens: int, block_size: int) -> int:
    """Most blocks that so many consecutive tokens lie in."""
    return (num_tokens + block_size - 2) // block_size + 1 if num_tokens else 0
