"""LayerContext: device and dtype of a model's weights, and the quantisation methods of its linear layers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.parallel import SINGLE, Parallel
from slipstream.nn.quant import QuantMethod
from slipstream.nn.quant.unquantized import UNQUANTIZED
from slipstream.nn.side_stream import SideStream
from slipstream.nn.stored_names import module_name

if TYPE_CHECKING:
    from slipstream.nn.lora import LoraRows


@dataclass(frozen=True)
class LayerContext:
    device: torch.device
    dtype: torch.dtype  # of activations, and of weights that are not quantised
    method: QuantMethod
    head_method: QuantMethod  # of lm_head, which most quantised checkpoints do not quantise
    parallel: Parallel = SINGLE
    stands_for: torch.device | None = None  # the device that tensors on the meta device stand for
    expert_method: QuantMethod | None = None  # of the experts, if it differs
    lora: LoraRows | None = None  # slots of adapters beside linear layers; None: adapters are not served
    plain_method: QuantMethod = UNQUANTIZED  # of what is never quantised
    plain: frozenset[str] = frozenset()  # as LayerSpec has it, of the layer that is built
    beside: SideStream = field(default_factory=SideStream, compare=False)  # the model's, shared by its layers

    @property
    def computes_on(self) -> torch.device:
        return self.stands_for or self.device

    def method_of(self, spec: LinearSpec) -> QuantMethod:
        """What holds a linear layer, whose parts are all plain or none."""
        return self.plain_method if module_name(spec.parts[0][0]) in self.plain else self.method

    @property
    def of_experts(self) -> LayerContext:
        return self if self.expert_method is None else replace(self, method=self.expert_method)

    @property
    def of_plain(self) -> LayerContext:
        return replace(self, method=self.plain_method)

    @property
    def of_head(self) -> LayerContext:
        return replace(self, method=self.head_method)
