"""Adapters that clients send with a request, as TensorRT-LLM's do, and then name by a number of their own.

Any thread. They stay in host memory while requests have them, and afterwards until others need the room, the one that
was named the longest time ago first. Clients with different cache salts do not see each other's.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from slipstream.core.adapters import Adapter, SentAdapter
from slipstream.core.errors import CapacityError, ConfigError, RequestError
from slipstream.core.request import Request
from slipstream.nn.adapter_files import AdapterModel, finite_pair
from slipstream.nn.lora import LoraPair, LoraTarget, PackedPairs

# TensorRT-LLM's module ids, by the parts that a module is of. Its converter calls Hugging Face's gate 5 and up 7.
MODULES: Mapping[int, tuple[str, ...]] = {
    0: ("q", "k", "v"),
    1: ("q",),
    2: ("k",),
    3: ("v",),
    4: ("o",),
    5: ("gate",),
    6: ("down",),
    7: ("up",),
}


class SentAdapters:
    """limit: bytes of all of them, also of those that only running requests still have. goes_to_ranks: other processes
    get them too."""

    def __init__(
        self,
        model: AdapterModel,
        dtype: torch.dtype,
        numbers: Iterator[int],
        limit: int,
        goes_to_ranks: bool,
    ) -> None:
        self._targets, self._max_rank, self._dtype = model.targets, model.max_rank, dtype
        self._modules = {(target.layer, target.names): module for module, target in self._targets.items()}
        self._goes_to_ranks = goes_to_ranks
        self._numbers, self._limit = numbers, limit
        self._live: weakref.WeakSet[Adapter] = weakref.WeakSet()  # known ones, and those that requests still have
        self._known: OrderedDict[tuple[bytes, int], Adapter] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, request: Request, sent: SentAdapter) -> Adapter:
        """Raises RequestError, or CapacityError while the adapters of other requests take all room."""
        if not self._limit:
            raise RequestError("lora_task_id", "LoRA weights are not taken: lora_cache_host_memory_bytes is 0")
        key = request.prefix_key, sent.task_id
        if sent.weights is not None:
            pairs = self._pairs(sent)
            return self._keep(key, PackedPairs.of(pairs) if self._goes_to_ranks else pairs)
        with self._lock:
            adapter = self._known.get(key)
            if adapter is None:
                reason = "accepted: an adapter that is in the cache; send lora_weights and lora_config again"
                raise RequestError("lora_task_id", f"got {sent.task_id}, {reason}")
            self._known.move_to_end(key)
            return adapter

    # ---- parts

    def _keep(self, key: tuple[bytes, int], pairs: Mapping[str, LoraPair]) -> Adapter:
        num_bytes = sum(pair.a.nbytes + pair.b.nbytes for pair in pairs.values())
        if num_bytes > self._limit:
            raise RequestError(
                "lora_weights", f"has {num_bytes} bytes, accepted: at most lora_cache_host_memory_bytes={self._limit}"
            )
        with self._lock:
            self._known.pop(key, None)
            while (is_full := self._held_bytes() + num_bytes > self._limit) and self._known:
                self._known.popitem(last=False)  # goes at once, if no request has it
            if is_full:
                raise CapacityError("the adapters of other requests fill lora_cache_host_memory_bytes; try again later")
            adapter = Adapter(f"task {key[1]}", next(self._numbers), pairs, num_bytes)
            self._live.add(adapter)
            self._known[key] = adapter
            return adapter

    def _held_bytes(self) -> int:
        return sum(adapter.num_bytes for adapter in self._live)

    def _pairs(self, sent: SentAdapter) -> dict[str, LoraPair]:
        assert sent.weights is not None and sent.config is not None
        rows = np.frombuffer(sent.weights.data, np.float16).reshape(sent.weights.shape)
        config = np.frombuffer(sent.config.data, np.int32).reshape(sent.config.shape)
        if not 0 < len(rows) == len(config) <= len(self._targets):
            counts = f"{len(rows)} rows and lora_config {len(config)}"
            raise RequestError("lora_weights", f"has {counts}, accepted: as many, 1 to {len(self._targets)}")
        pairs: dict[str, LoraPair] = {}
        for row, (module_id, layer, rank) in zip(rows, config.tolist()):
            module = self._modules.get((layer, MODULES.get(module_id, ())))
            if module is None or module in pairs:
                known = ", ".join(str(number) for number in MODULES if (0, MODULES[number]) in self._modules)
                accepted = f"module ids {known} of each layer once"
                raise RequestError("lora_config", f"got module {module_id} of layer {layer}, accepted: {accepted}")
            pairs[module] = self._pair(row, self._targets[module], rank, module)
        return pairs

    def _pair(self, row: np.ndarray, target: LoraTarget, rank: int, module: str) -> LoraPair:
        if not 0 < rank <= self._max_rank:
            raise RequestError("lora_config", f"got rank {rank}, accepted: 1 to max_lora_rank={self._max_rank}")
        of_a, of_b = rank * target.in_features, target.out_features * rank
        if len(row) < of_a + of_b:
            needed = f"{of_a} + {of_b} for rank {rank} of {module}"
            raise RequestError("lora_weights", f"has rows of {len(row)} numbers, accepted: at least {needed}")
        a = torch.from_numpy(row[:of_a].reshape(rank, target.in_features).copy()).to(self._dtype)
        b = torch.from_numpy(row[of_a : of_a + of_b].reshape(target.out_features, rank).copy()).to(self._dtype)
        try:
            return finite_pair(module, a, b)
        except ConfigError as error:
            raise RequestError("lora_weights", f"{module} {error.accepted}") from None
