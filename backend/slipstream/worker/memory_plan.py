"""MemoryPlan: bytes of a rank by use, the KV blocks that are left, and the table of both that a load logs.

Plain data and its arithmetic; worker/plan_memory.py works it out.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from slipstream.core.kv_groups import ONE_GROUP, KVGroups

MIB = 1 << 20


@dataclass(frozen=True)
class StageMemory:
    """Plan of a rank of one stage. layers: their numbers in the model. draft_block_bytes: part of bytes_per_block."""

    layers: range
    weight_bytes: int
    workspace_bytes: int
    bytes_per_block: int
    draft_block_bytes: int = 0

    def pool_bytes(self, num_blocks: int) -> int:
        return num_blocks * self.bytes_per_block

    def total_bytes(self, num_blocks: int) -> int:
        """Bytes of all that a rank allocates. num_blocks: of the KV pool."""
        return self.weight_bytes + self.workspace_bytes + self.pool_bytes(num_blocks)

    def row(self, index: int, num_blocks: int) -> tuple[str, int, str]:
        """A row of the plan's table: what it is, bytes, a note."""
        pool = size_text(self.pool_bytes(num_blocks))
        note = f"{size_text(self.weight_bytes)} weights, {size_text(self.workspace_bytes)} workspace, {pool} KV pool"
        if self.draft_block_bytes:
            note += f", {size_text(num_blocks * self.draft_block_bytes)} of it the drafter's"
        return (
            f"stage {index}: layers {self.layers.start} to {self.layers.stop - 1}",
            self.total_bytes(num_blocks),
            note,
        )


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by use, and what they allow. num_blocks: of the KV pool; num_host_blocks: of what lies behind it.

    stages: of a model in several; the plan is that of a rank of `stage`, where the fewest blocks fit. All have so many.
    """

    free_bytes: int
    weight_bytes: int
    workspace_bytes: int
    block_bytes: int
    block_size: int
    num_blocks: int
    max_model_len: int
    num_host_blocks: int = 0
    draft_block_bytes: int = 0  # of the drafter's cache, per block of the pool
    groups: KVGroups = ONE_GROUP
    full_hold_reason: str = ""  # why windowed layers hold every token, if there are some that do
    stages: tuple[StageMemory, ...] = ()
    stage: int = 0

    @property
    def bytes_per_block(self) -> int:
        """A block of the model's cache and its twin in the drafter's."""
        return self.block_bytes + self.draft_block_bytes

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pool holds, with several groups in sequences of max_model_len."""
        num_blocks = -(-self.max_model_len // self.block_size)
        return self.num_blocks * num_blocks // self._blocks_of_longest * self.block_size

    @property
    def num_full_sequences(self) -> int:
        """Sequences of max_model_len tokens that the pool holds at once."""
        return self.num_blocks // self._blocks_of_longest

    @property
    def _blocks_of_longest(self) -> int:
        return self.groups.decode_blocks(self.max_model_len, self.block_size)

    def __str__(self) -> str:
        rows = [
            ("free device memory", self.free_bytes, ""),
            ("weights", self.weight_bytes, self._stage_note),
            ("workspace (activations, logits)", self.workspace_bytes, ""),
            ("KV pool", self.pool_bytes, f"{self.num_blocks} blocks x {self.block_size} tokens"),
            ("  per token", self.pool_bytes // max(1, self.pool_tokens), self._windows_note),
        ]
        if self.draft_block_bytes:
            rows.append(("  of it the drafter's", self.num_blocks * self.draft_block_bytes, ""))
        if self.num_host_blocks:
            host_bytes = self.num_host_blocks * self.block_bytes
            rows.append(("host memory behind the KV pool", host_bytes, f"{self.num_host_blocks} blocks"))
        rows += [stage.row(index, self.num_blocks) for index, stage in enumerate(self.stages)]
        lines = [f"  {name:<32}{size_text(num_bytes):>12}  {note}".rstrip() for name, num_bytes, note in rows]
        held = f"holds {self.num_full_sequences} sequences of max_model_len={self.max_model_len} tokens"
        return "\n".join(["memory plan", *lines, f"  {held}"])

    def log(self, logger: logging.Logger) -> None:
        for line in str(self).splitlines():
            logger.info("%s", line)

    @property
    def _stage_note(self) -> str:
        if not self.stages:
            return ""
        return f"here and below those of stage {self.stage}, where the fewest blocks fit"

    @property
    def _windows_note(self) -> str:
        if self.full_hold_reason:
            return f"windowed layers hold every token: {self.full_hold_reason}"
        groups = self.groups
        if not groups.num_windowed:
            return ""
        kept = f"{groups.num_windowed} of {groups.num_groups} groups of layers hold {groups.num_kept_tokens} tokens"
        return f"at max_model_len: {kept} and a step"


def size_text(num_bytes: int) -> str:
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.2f} GiB"
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes >= MIB else f"{num_bytes} B"
