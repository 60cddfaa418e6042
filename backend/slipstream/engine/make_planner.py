"""The planner of an engine's drafts, by its configuration, its weights and the times measured at start."""

from __future__ import annotations

import torch

from slipstream.core.config import EngineConfig
from slipstream.core.speculation import DraftPlanner
from slipstream.core.step_costs import StepCosts
from slipstream.nn.quant import FREE_TOKENS, choose_methods
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.hardware import Hardware

_FREE_TOKENS_OF_FLOAT32 = 28  # its products do not run on tensor cores


def make_planner(
    config: EngineConfig, spec: DecoderSpec, hardware: Hardware, costs: StepCosts | None = None
) -> DraftPlanner:
    """costs: step times measured at start, or None. Without them the number of free rows follows from the weights'
    format. On a CPU, which is for development, there is no limit."""
    if config.speculation.throttle == "off":
        return DraftPlanner()
    free_tokens = config.speculation.free_tokens
    if free_tokens == 0 and costs is None and hardware.device.type == "cuda":
        free_tokens = _free_tokens(config, spec, hardware)
    return DraftPlanner(max(0, free_tokens), is_adaptive=True, costs=costs)


def _free_tokens(config: EngineConfig, spec: DecoderSpec, hardware: Hardware) -> int:
    if hardware.dtype == torch.float32:
        return _FREE_TOKENS_OF_FLOAT32
    return FREE_TOKENS[choose_methods(config.model, spec).name]
