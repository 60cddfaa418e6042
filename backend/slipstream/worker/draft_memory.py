"""Device memory of the loaded speculation methods, for the memory plan. Engine thread, once at load."""

from __future__ import annotations

from slipstream.core.config import EngineConfig
from slipstream.nn.load import planned_model
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.hardware import Hardware
from slipstream.worker.spec_decode import PROPOSERS
from slipstream.worker.spec_decode.planning import DraftMemory, Planning


def draft_memory(config: EngineConfig, spec: DecoderSpec, hardware: Hardware) -> DraftMemory:
    """The memory of all methods loaded, on a rank; none behind the first stage, which drafts.

    Raises ConfigError for a drafter whose files cannot be read."""
    if config.model.load_format == "null" or not config.speculation.loaded or hardware.parallel.stage:
        return DraftMemory()
    target = planned_model(config.model, spec, hardware.dtype, hardware.device, hardware.parallel)
    planning = Planning(config, target, hardware.kv_dtype)
    methods = [PROPOSERS.get(name) for name in config.speculation.loaded]
    return sum((method.planned(planning) for method in methods), DraftMemory())
