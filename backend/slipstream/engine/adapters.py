"""The LoRA adapters of a model by name: read from PEFT folders at load and by command, found for requests.

Any thread. Reading happens on the thread that asks, never on the engine's; adapters live in host memory, and the
engine's worker copies one into a slot when a request of it starts.
"""

from __future__ import annotations

import itertools
import json
import logging
import operator
import threading
from collections.abc import Mapping
from pathlib import Path

from slipstream.core.adapters import Adapter
from slipstream.core.config import ModelConfig
from slipstream.core.control import LOAD_LORA, UNLOAD_LORA, Control
from slipstream.core.errors import ConfigError, RequestError
from slipstream.core.request import Request
from slipstream.core.setting_values import shown
from slipstream.engine.sent_adapters import SentAdapters
from slipstream.nn.adapter_files import AdapterModel, ranks_of, read_adapter
from slipstream.nn.load import lora_targets, planned_model
from slipstream.nn.lora import LoraPair, PackedPairs
from slipstream.nn.models.family import FAMILIES
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.hardware import Hardware

logger = logging.getLogger(__name__)
_NUM_SHOWN = 20


class Adapters:
    """Raises ConfigError if an adapter of lora_modules cannot be read."""

    def __init__(self, config: ModelConfig, spec: DecoderSpec, hardware: Hardware) -> None:
        self._config, self._hardware = config, hardware
        self._by_name: dict[str, Adapter] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        if config.enable_lora:
            self._model = _adapter_model(config, spec, hardware)
            limit = config.lora_cache_bytes
            self._goes_to_ranks = hardware.parallel.num_ranks > 1
            self._sent = SentAdapters(self._model, hardware.dtype, self._numbers, limit, self._goes_to_ranks)
            for name, folder in _named_folders(config):
                self._put(self._read(name, folder))

    @property
    def names(self) -> list[str]:
        return sorted(self._by_name)

    def resolve(self, request: Request) -> None:
        """Give a request the adapter that it names. Raises RequestError."""
        name, sent = request.adapter_name, request.sent_adapter
        if not name and sent is None:
            return
        if not self._config.enable_lora:
            field = "lora_name" if name else "lora_task_id"
            raise RequestError(field, "LoRA feature is not enabled: the model has enable_lora off")
        adapter = self._by_name.get(name) if sent is None else self._sent.find(request, sent)
        request.sent_adapter = None  # its weights are large
        if adapter is None:
            known = ", ".join(map(repr, self.names[:_NUM_SHOWN]))
            raise RequestError("lora_name", f"LoRA {shown(name)} is not supported, we currently support [{known}]")
        request.adapter = adapter
        request.prefix_key += adapter.prefix_key

    def carry_out(self, control: Control) -> None:
        """Load or unload an adapter, or neither. Requests that run keep the one that they have. Raises RequestError."""
        if control.command == LOAD_LORA:
            self._load(control.name, control.folder)
        elif control.command == UNLOAD_LORA:
            self._unload(control.name)

    # ---- parts

    def _load(self, name: str, folder: str) -> None:
        root = Path(self._config.lora_root).resolve()
        refusal = RequestError("lora_path", f"got {shown(folder)}, accepted: a folder below the model's lora_root")
        try:
            path = (root / folder).resolve()
            if not folder or not path.is_relative_to(root) or path == root or not path.is_dir():
                raise refusal
        except (OSError, ValueError, RuntimeError):  # a name too long, a null byte, a circle of links
            raise refusal from None
        self._check_room(name)
        try:
            adapter = self._read(name, path)
        except ConfigError as error:
            raise RequestError("lora_path", error.accepted) from error
        self._put(adapter)

    def _unload(self, name: str) -> None:
        with self._lock:
            if self._by_name.pop(name, None) is None:
                raise RequestError("lora_name", f"got {shown(name)}, accepted: an adapter that is loaded")
        logger.info("adapter %s is unloaded", name)

    def _check_room(self, name: str) -> None:
        limit = self._config.max_cpu_loras
        if name not in self._by_name and len(self._by_name) >= limit:
            raise RequestError("lora_name", f"{limit} adapters are loaded, accepted: at most max_cpu_loras={limit}")

    def _read(self, name: str, folder: Path) -> Adapter:
        pairs: Mapping[str, LoraPair] = read_adapter(folder, self._model, self._hardware.dtype)
        num_bytes = sum(pair.a.nbytes + pair.b.nbytes for pair in pairs.values())
        is_pinned = self._hardware.device.type == "cuda"  # for copies that the engine's thread does not wait for
        if self._goes_to_ranks:
            packed = PackedPairs.of(pairs)
            pairs = packed.pin_memory() if is_pinned else packed
        elif is_pinned:
            pairs = {module: LoraPair(pair.a.pin_memory(), pair.b.pin_memory()) for module, pair in pairs.items()}
        logger.info("adapter %s: %d modules of %s, %.1f MB", name, len(pairs), folder, num_bytes / 1e6)
        return Adapter(name, next(self._numbers), pairs, num_bytes, str(folder))

    def _put(self, adapter: Adapter) -> None:
        with self._lock:
            self._check_room(adapter.name)
            self._by_name[adapter.name] = adapter


def adapter_report(config: ModelConfig, spec: DecoderSpec, hardware: Hardware) -> str:
    """What lora_modules would load, a line for each adapter, from the headers of its file. Raises ConfigError."""
    model = _adapter_model(config, spec, hardware)
    lines = [f"adapters: {config.max_loras} slots of rank {config.max_lora_rank} on the device"]
    for name, folder in _named_folders(config):
        ranks = ranks_of(folder, model)
        sizes = (model.targets[module].in_features + model.targets[module].out_features for module in ranks)
        num_bytes = hardware.dtype.itemsize * sum(map(operator.mul, ranks.values(), sizes))
        low, high = min(ranks.values()), max(ranks.values())
        rank = f"rank {low}" if low == high else f"ranks {low} to {high}"
        lines.append(f"  {name}: {len(ranks)} modules of {rank}, {num_bytes / 1e6:.1f} MB in host memory, {folder}")
    return "\n".join(lines)


def _adapter_model(config: ModelConfig, spec: DecoderSpec, hardware: Hardware) -> AdapterModel:
    targets = lora_targets(planned_model(config, spec, hardware.dtype, hardware.device)).targets
    return AdapterModel(targets, FAMILIES.get(spec.architecture), config.max_lora_rank)


def _named_folders(config: ModelConfig) -> list[tuple[str, Path]]:
    return [(name, Path(folder)) for name, folder in json.loads(config.lora_modules or "{}").items()]
