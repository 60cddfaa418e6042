"""LayerContext: where a model's weights live, in what dtype, and how its linear layers hold and multiply them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from slipstream.nn.parallel import SINGLE, Parallel
from slipstream.nn.quant import QuantMethod


@dataclass(frozen=True)
class LayerContext:
    device: torch.device
    dtype: torch.dtype  # of activations, and of weights that are not quantised
    method: QuantMethod
    head_method: QuantMethod  # of lm_head, which most quantised checkpoints leave alone
    parallel: Parallel = SINGLE
    stands_for: torch.device | None = None  # where tensors on the meta device would be
    expert_method: QuantMethod | None = None  # of MoE layers' experts, where it is another

    @property
    def computes_on(self) -> torch.device:
        return self.stands_for or self.device

    @property
    def of_experts(self) -> LayerContext:
        return self if self.expert_method is None else replace(self, method=self.expert_method)

    @property
    def of_head(self) -> LayerContext:
        return replace(self, method=self.head_method)
