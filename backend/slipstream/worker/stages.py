"""Which layers each stage of a model has: those asked for, or such that the largest stage is as small as can be.

Engine thread, once at load. Plain arithmetic over the sizes of weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.core.config import EngineConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.load import META, planned_model
from slipstream.nn.parallel import Parallel
from slipstream.nn.spec import DecoderSpec

FIELD = "pipeline_parallel_size"


def stage_layers(
    config: EngineConfig, spec: DecoderSpec, dtype: torch.dtype, parallel: Parallel, draft_bytes: int
) -> tuple[int, ...]:
    """Numbers of layers of the stages, empty for one stage. parallel: a rank of the first stage, which names none yet.
    draft_bytes: weights of drafters, which are that stage's.

    Raises ConfigError for more stages than layers, for numbers that are not those of the model, and for what stages
    cannot do.
    """
    num_stages, asked = config.parallel.pipeline_parallel_size, config.parallel.pipeline_layers
    if num_stages == 1:
        if asked:
            raise ConfigError("pipeline_layers", asked, "accepted with pipeline_parallel_size above 1")
        return ()
    if num_stages > spec.num_layers:
        raise ConfigError(FIELD, num_stages, f"accepted: at most {spec.num_layers}, the model's layers")
    if not asked:
        decoder = planned_model(config.model, spec, dtype, META, parallel)
        costs = [sum(tensor.nbytes for tensor in layer.tensors()) for layer in decoder.layers]
        ends = sum(tensor.nbytes for tensor in decoder.tensors()) - sum(costs)
        return balanced(costs, ends + draft_bytes, num_stages)
    layers = tuple(int(count) for count in asked.split(","))
    if len(layers) != num_stages or sum(layers) != spec.num_layers:
        accepted = f"{num_stages} numbers of layers, together {spec.num_layers}"
        raise ConfigError("pipeline_layers", asked, f"accepted: {accepted}")
    return layers


def balanced(costs: Sequence[int], ends: int, num_stages: int) -> tuple[int, ...]:
    """Numbers of layers, one or more a stage, with the smallest cost of the most expensive stage; of several such ways
    one whose stages but the last are as full as that allows. ends: what the first stage costs without layers."""
    low, high = max(max(costs), ends + costs[0]), ends + sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(costs, ends, num_stages, middle) else (middle + 1, high)
    return _filled(costs, ends, num_stages, low)


def _fits(costs: Sequence[int], ends: int, num_stages: int, limit: int) -> bool:
    return sum(_filled(costs, ends, num_stages, limit)) == len(costs)


def _filled(costs: Sequence[int], ends: int, num_stages: int, limit: int) -> tuple[int, ...]:
    """Each stage takes layers up to the limit, but leaves one to each stage behind it."""
    counts, first = [], 0
    for stage in range(num_stages):
        total, count = 0 if stage else ends, 0
        most = len(costs) - first - (num_stages - 1 - stage)
        while count < most and total + costs[first + count] <= limit:
            total, count = total + costs[first + count], count + 1
        counts.append(count)
        first += count
    return tuple(counts)
