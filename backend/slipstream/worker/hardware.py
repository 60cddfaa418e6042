"""Hardware: where a rank computes, and in which types. Plain data, passed from the engine to all that allocates."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.core.host_memory import host_memory
from slipstream.nn.parallel import SINGLE, Parallel


@dataclass(frozen=True)
class Hardware:
    """Where to compute and in which types, with every "auto" resolved. kv_dtype: as ops.KvCache names types.

    parallel: of several processes that share the model, which one computes here."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    parallel: Parallel = SINGLE


def free_device_memory(hardware: Hardware) -> int:
    """Bytes that this process may still take on the device. Ranks on a CPU take from the same memory."""
    if hardware.device.type == "cuda":
        return torch.cuda.mem_get_info(hardware.device)[0]
    return host_memory().available_bytes // hardware.parallel.num_local
