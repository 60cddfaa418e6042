"""Steps of padding that a runner makes before it serves: they compile kernels and initialise libraries.

Engine thread, at start, within torch.inference_mode. All stages and ranks make the same ones. Writes nothing to the
KV pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from slipstream.nn.batch import ForwardBatch
from slipstream.nn.decoder import Decoder
from slipstream.nn.kv_layout import LayerCache
from slipstream.worker.graph_shapes import DraftLayout
from slipstream.worker.hardware import Hardware
from slipstream.worker.input_batch import padding_batch
from slipstream.worker.launched_step import ComputedRows
from slipstream.worker.pipeline import PipelineStage
from slipstream.worker.spec_decode.verifier import Verifier
from slipstream.worker.spec_decode.warm_up import padding_drafts


@dataclass(frozen=True)
class Rehearsal:
    """max_blocks: of a block table. stage: of a model in several."""

    model: Decoder
    hardware: Hardware
    kv_caches: Sequence[LayerCache]
    stage: PipelineStage | None
    max_blocks: int

    def step(self, num_tokens: int, longest: int) -> torch.Tensor | None:
        """Run num_tokens rows as of a sequence of `longest` tokens. Returns the logits of the first row, [1, vocab];
        None behind the first stage."""
        device = self.hardware.device
        batch = padding_batch(num_tokens, self.max_blocks if device.type == "cuda" else 1, device)
        hidden = self._run(replace(batch, max_seq_len=longest))
        self.hardware.parallel.note(f"warm-up of {num_tokens} tokens")
        return None if hidden is None else self.model.raw_logits(hidden[:1])

    def drafts(self, layout: DraftLayout, verifier: Verifier) -> list[ComputedRows]:
        """Run what steps with drafts run, in CUDA graphs or without. Returns the rows of the first stage's."""
        found = []
        for batch in padding_drafts(layout, self.max_blocks, self.hardware.device):
            hidden = self._run(batch)
            if hidden is not None:
                found.append(verifier.warm_up(batch, hidden))
        return found

    def _run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """The hidden states of all rows; None behind the first stage."""
        return self.model.forward(batch, self.kv_caches) if self.stage is None else self.stage.run(batch)
