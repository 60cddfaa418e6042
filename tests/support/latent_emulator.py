"""The CUDA kernels of latent attention on a CPU (emulation.py)."""

from __future__ import annotations

import emulation
from slipstream_kernels.attention.cuda import latent_attention
from slipstream_kernels.attention.latent_call import LatentCall


def emulate(call: LatentCall, schedule: latent_attention.Schedule, seed: int) -> None:
    """What attention/cuda/latent_attention.py launches.  Raises if the grid's threads deadlock."""
    num_ctas = schedule.num_shares * schedule.num_lanes
    params, _plan = latent_attention.arguments(call, schedule, latent_attention.workspace(call.q.device, num_ctas))
    emulation.run("emulate_latent.cc", latent_attention.defines_of(call, schedule.rows), params, seed)
