"""Writes a quantised checkpoint: the quantised tensors, those changed by folding, and the others unchanged."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from slipstream.nn.checkpoint_path import copy_templates
from slipstream.nn.decoder import Decoder
from slipstream.nn.latent_attention import LatentAttention
from slipstream.nn.models.family import FAMILIES
from slipstream.nn.stored_names import Names, tensor_name
from slipstream.nn.tensor_file import write_tensors
from slipstream.nn.weights import INDEX_FILE, SINGLE_FILE, checkpoint_files, read_headers
from torch import Tensor

from quantization.calibration import quantised_linears
from quantization.folding import kept_linears, rows_of
from quantization.plan import Kept, Plan
from quantization.quantizer import Stored

SHARD_BYTES = 4 << 30
KV_B = "kv_b"  # of latent attention, held unquantised by every method
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


class ShardWriter:
    """Writes tensors to files of at most `shard_bytes`, so that the host holds at most one of these."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.shard_bytes = folder, shard_bytes
        self.tensors: dict[str, Tensor] = {}
        self.shards: list[list[str]] = []
        self.total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """The tensor is copied to the host."""
        held = sum(known.nbytes for known in self.tensors.values())
        if self.tensors and held + tensor.nbytes > self.shard_bytes:
            self._flush()
        self.tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self.total_bytes += tensor.nbytes

    def close(self) -> None:
        """Write what is left, and the index if there are several files."""
        self._flush()
        count = len(self.shards)
        if count == 1:
            self._path(0).rename(self.folder / SINGLE_FILE)
            return
        weight_map = {}
        for number, names in enumerate(self.shards):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._path(number).rename(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self.folder / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")

    def _flush(self) -> None:
        write_tensors(self.tensors, self._path(len(self.shards)))
        self.shards.append(list(self.tensors))
        self.tensors = {}

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number}.safetensors"


def write_checkpoint(model: Path, output: Path, decoder: Decoder, plan: Plan, stored: Stored) -> int:
    """Consume `stored` and write the checkpoint to `output`. Returns the bytes of all tensors."""
    output.mkdir(parents=True, exist_ok=True)
    names = FAMILIES.get(decoder.spec.architecture).names_of(decoder.spec)
    writer = ShardWriter(output)
    for part, layer, tensors in stored:
        of_attention = part == "attention"  # whose scales of keys and values are no linear's
        module = tensor_name(names, "q", layer).rpartition(".")[0] if of_attention else tensor_name(names, part, layer)
        for suffix, tensor in tensors.items():
            writer.add(f"{module}.{suffix}", tensor)
    changed, headers = _changed(decoder, names, plan), read_headers(checkpoint_files(model))
    for name, header in headers.items():
        if name not in changed:
            with safe_open(header.file, framework="pt") as file:
                writer.add(name, file.get_tensor(name))
        elif (value := changed[name]) is not None:
            writer.add(name, value.to(decoder.spec.dtype))
    writer.close()
    for path in model.iterdir():
        if path.is_file() and path.suffix not in NOT_COPIED and path.name not in ("config.json", INDEX_FILE):
            shutil.copy(path, output / path.name)
    copy_templates(model, output)
    config = json.loads((model / "config.json").read_text())
    said = plan.config(_quantised(decoder, names), Kept(_kept(decoder, names), _layers_beyond(decoder, headers)))
    (output / "config.json").write_text(json.dumps({**config, "quantization_config": said}, indent=2) + "\n")
    return writer.total_bytes


def _changed(decoder: Decoder, names: Names, plan: Plan) -> dict[str, torch.Tensor | None]:
    """Replacements of the full checkpoint's tensors by name; None: already stored under other names."""
    changed: dict[str, Tensor | None] = {f"{tensor_name(names, 'lm_head', 0)}.weight": None} if plan.with_head else {}
    for index, layer in enumerate(decoder.layers):
        for module, norm in layer.norms():
            changed[f"{tensor_name(names, module, index)}.weight"] = norm.weight
        for part, kept in kept_linears(layer).items():
            changed[f"{tensor_name(names, part, index)}.weight"] = kept.weights["weight"]
        if isinstance(layer.attention, LatentAttention):
            changed[f"{tensor_name(names, KV_B, index)}.weight"] = layer.attention.kv_b.matrix
        for linear in quantised_linears(layer):
            for part, _ in linear.spec.parts:
                module = tensor_name(names, part, index)
                changed[f"{module}.weight"] = None
                if "bias" in linear.weights:
                    changed[f"{module}.bias"] = linear.weights["bias"][rows_of(linear, part)]
    return changed


def _quantised(decoder: Decoder, names: Names) -> list[str]:
    """The modules of the quantised layers, without experts."""
    linears = [(index, linear) for index, layer in enumerate(decoder.layers) for linear in quantised_linears(layer)]
    own = [(index, linear) for index, linear in linears if not linear.spec.num_experts]
    return [tensor_name(names, part, index) for index, linear in own for part, _ in linear.spec.parts]


def _kept(decoder: Decoder, names: Names) -> list[str]:
    """The modules that stay unquantised: routers, gates of shared experts, kv_b of latent attention."""
    found = []
    for index, layer in enumerate(decoder.layers):
        parts = [*([KV_B] if isinstance(layer.attention, LatentAttention) else []), *kept_linears(layer)]
        found += [tensor_name(names, part, index) for part in parts]
    return found


def _layers_beyond(decoder: Decoder, headers: Iterable[str]) -> list[str]:
    """Layers of the checkpoint behind the decoder's, such as one for multi-token prediction: they are copied."""
    found = [match for name in headers if (match := _LAYER.match(name)) and int(match[1]) >= decoder.spec.num_layers]
    return list(dict.fromkeys(match[0].removesuffix(".") for match in found))
