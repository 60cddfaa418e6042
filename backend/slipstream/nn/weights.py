"""Streams a checkpoint's safetensors into the decoder, or draws dummy weights of the same shapes on its device.

All names, shapes and types are checked from the files' headers before the first tensor is read. Tensors are read one
at a time from memory-mapped files, so the host holds about one tensor beyond the model itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from slipstream.core.errors import ConfigError
from slipstream.core.lfs_pointer import lfs_advice
from slipstream.nn.decoder import Decoder
from slipstream.nn.hf_config import read_json
from slipstream.nn.key_means import FILE as KEY_MEANS_FILE
from slipstream.nn.kv_scales import UNUSED_SUFFIXES, kv_scale_slots
from slipstream.nn.models.family import FAMILIES
from slipstream.nn.parallel import Parallel
from slipstream.nn.stored_names import mtp_layers, tensor_name
from slipstream.nn.weight_slot import WeightSlot, long_axes

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_ROWS_AT_ONCE = 4096
_NUM_SAMPLES, _SAMPLE_BYTES = 32, 4096  # of a file, by which nodes compare their checkpoints
_NUM_NAMED = 3  # max number of tensors that an error message lists


@dataclass(frozen=True)
class TensorHeader:
    """A tensor's entry in a file's header. name: in the file. dtype: the name in safetensors ("BF16", …)."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


def load_checkpoint(decoder: Decoder, checkpoint_dir: Path) -> None:
    """Load the decoder from the folder's safetensors. Raises as `check_checkpoint`, before any tensor is read, and for
    a head that differs from the embedding that it is tied to."""
    stored = _stored_headers(decoder, checkpoint_dir)
    slots, headers = _check_stored(decoder, stored, checkpoint_dir)
    _check_tied_head(decoder, stored)
    _check_empty_biases(slots, stored)
    if decoder.context.parallel.num_stages > 1:
        names = FAMILIES.get(decoder.spec.architecture).names_of(decoder.spec)
        elsewhere = decoder.weight_slots(names).keys() - decoder.own_slots(names).keys()
        slots = {name: slot for name, slot in slots.items() if name not in elsewhere}
    _stream(slots, headers, decoder.context.parallel)


def check_same_on_nodes(checkpoint_dir: Path, parallel: Parallel) -> None:
    """Raises ConfigError on a rank whose checkpoint is not the first rank's: together they would make nonsense. All
    ranks call it."""
    if parallel.num_nodes == 1:
        return
    own = _sampled(checkpoint_files(checkpoint_dir))
    if own != parallel.decide(own):
        reason = "holds other weights than the first node has; accepted: the same checkpoint on all nodes"
        raise ConfigError("model", str(checkpoint_dir), reason)


def _sampled(files: list[Path]) -> str:
    """A hash of the files' sizes and of samples all over them: other weights of the same shapes have another."""
    found = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            size = path.stat().st_size
            found.update(f"{path.name} {size}\n".encode())
            for index in range(_NUM_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * index // (_NUM_SAMPLES - 1))
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()


def check_checkpoint(
    decoder: Decoder, checkpoint_dir: Path
) -> tuple[Mapping[str, WeightSlot], Mapping[str, TensorHeader]]:
    """The decoder's slots and the headers of their tensors. Reads only headers; the decoder may be on "meta".

    Raises ConfigError naming the file (missing, truncated, not safetensors) or the tensors (missing, unexpected, wrong
    shape or type).
    """
    return _check_stored(decoder, _stored_headers(decoder, checkpoint_dir), checkpoint_dir)


def _stored_headers(decoder: Decoder, checkpoint_dir: Path) -> dict[str, TensorHeader]:
    """Headers of all tensors, by the names that the family reads them as."""
    family = FAMILIES.get(decoder.spec.architecture)
    return {family.read_as(name): header for name, header in read_headers(checkpoint_files(checkpoint_dir)).items()}


def _check_stored(
    decoder: Decoder, headers: Mapping[str, TensorHeader], checkpoint_dir: Path
) -> tuple[Mapping[str, WeightSlot], Mapping[str, TensorHeader]]:
    family = FAMILIES.get(decoder.spec.architecture)
    names = family.names_of(decoder.spec)
    slots = decoder.weight_slots(names)
    attentions = [layer.attention for layer in decoder.layers]
    scales = kv_scale_slots(attentions, ((name, header.shape) for name, header in headers.items()))
    slots |= scales
    ignored = family.ignored_suffixes
    if decoder.spec.stored_format is not None or scales:
        ignored += UNUSED_SUFFIXES
    if decoder.spec.tie_word_embeddings:  # some checkpoints store the tied table twice
        ignored = (*ignored, f"{tensor_name(names, 'lm_head', 0)}.weight")
    beyond = family.ignored_prefixes
    if family.has_mtp_layers:
        modules = [layer for layer in mtp_layers(headers) if layer >= decoder.spec.num_layers]
        beyond += tuple(f"model.layers.{layer}." for layer in modules)
    headers = {
        name: header
        for name, header in headers.items()
        if name in slots or not (name.endswith(ignored) or name.startswith(beyond) or _is_empty_bias(name, slots))
    }
    _check(slots, headers, checkpoint_dir)
    return slots, headers


def _check_tied_head(decoder: Decoder, headers: Mapping[str, TensorHeader]) -> None:
    """Raise ConfigError if a head is stored that is not the embedding, though config.json ties both.

    Hugging Face multiplies with such a head (transformers 5) or passes over it (4): the owner must say which is meant.
    """
    if not decoder.spec.tie_word_embeddings:
        return
    names = FAMILIES.get(decoder.spec.architecture).names_of(decoder.spec)
    head, table = (headers.get(f"{tensor_name(names, part, 0)}.weight") for part in ("lm_head", "embedding"))
    if head is None or table is None or _are_equal(head, table):
        return
    reason = (
        f"differs from {table.name}, to which config.json ties it; accepted: tie_word_embeddings: false, or without it"
    )
    raise ConfigError("model", str(head.file), f"tensor {head.name} {reason}")


def _is_empty_bias(name: str, slots: Mapping[str, WeightSlot]) -> bool:
    """Whether it is what old versions of AutoGPTQ store beside words of a layer without a bias: zeros."""
    module, _, suffix = name.rpartition(".")
    return suffix == "bias" and name not in slots and f"{module}.qweight" in slots


def _check_empty_biases(slots: Mapping[str, WeightSlot], headers: Mapping[str, TensorHeader]) -> None:
    for name, header in headers.items():
        if not _is_empty_bias(name, slots):
            continue
        with safe_open(header.file, framework="pt") as tensors:
            if tensors.get_tensor(header.name).any():
                reason = "is not zero, and config.json implies no such bias; accepted: zeros"
                raise ConfigError("model", str(header.file), f"tensor {header.name} {reason}")


def _are_equal(one: TensorHeader, other: TensorHeader) -> bool:
    """Whether two tables hold the same numbers; a part of their rows is read at a time."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    with safe_open(one.file, framework="pt") as first, safe_open(other.file, framework="pt") as second:
        rows, others = first.get_slice(one.name), second.get_slice(other.name)
        starts = range(0, one.shape[0], _ROWS_AT_ONCE)
        return all(torch.equal(rows[at : at + _ROWS_AT_ONCE], others[at : at + _ROWS_AT_ONCE]) for at in starts)


def tensor_without_numbers(checkpoint_dir: Path) -> str:
    """The first tensor with NaN or infinity, "" if there is none. Reads all weights: call it only for an error."""
    for file in checkpoint_files(checkpoint_dir):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                tensor = tensors.get_tensor(name)
                if tensor.is_floating_point() and not tensor.float().isfinite().all():
                    return f"{name} of {file.name}"
    return ""


def draw_dummies(decoder: Decoder, seed: int) -> None:
    """Draw random weights on the decoder's device, scaled so that activations have the scale of a trained model.

    They load through the same slots as a checkpoint, and so through the quantisation methods.
    """
    device, dtype = decoder.context.device, decoder.context.dtype
    generator = torch.Generator(device).manual_seed(seed)
    for slot in decoder.own_slots(FAMILIES.get(decoder.spec.architecture).names_of(decoder.spec)).values():
        tensor = torch.empty(slot.shape, device=device, dtype=dtype)
        slot.load(tensor.normal_(slot.mean, slot.std, generator=generator))
        decoder.context.parallel.note("dummy weights")


def checkpoint_files(checkpoint_dir: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those of its index, or the single one, or else all of the folder.

    Raises ConfigError for a wrong index, a missing shard of it, or a folder without weights.
    """
    index = checkpoint_dir / INDEX_FILE
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ConfigError("model", str(index), "must hold a weight_map of tensor names to file names")
        beyond = next((file for file in weight_map.values() if not file or Path(file).name != file), None)
        if beyond is not None:
            reason = f"names {beyond!r}; accepted: files of the same folder, by their name alone"
            raise ConfigError("model", str(index), reason)
        files = [checkpoint_dir / name for name in sorted(set(weight_map.values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ConfigError("model", str(checkpoint_dir), f"shards of {INDEX_FILE} are missing: {', '.join(absent)}")
        return files
    files = files_without_index(checkpoint_dir)
    if files:
        return files
    pickled = sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in checkpoint_dir.glob(pattern))
    found = f"; found {', '.join(pickled[:_NUM_NAMED])}: `slipstream convert` writes safetensors" if pickled else ""
    raise ConfigError("model", str(checkpoint_dir), f"needs {SINGLE_FILE}, or shards *.safetensors{found}")


def files_without_index(checkpoint_dir: Path) -> list[Path]:
    """The weights of a folder that has no index: the single file, else every shard, as their headers hold the names."""
    single = checkpoint_dir / SINGLE_FILE
    if single.is_file():
        return [single]
    return sorted(file for file in checkpoint_dir.glob("*.safetensors") if file.name != KEY_MEANS_FILE)


def read_headers(files: list[Path]) -> dict[str, TensorHeader]:
    """The headers of all tensors. Raises ConfigError for a truncated file or a tensor stored twice."""
    headers: dict[str, TensorHeader] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                    if name in headers:
                        other = headers[name].file.name
                        reason = f"tensor {name} is in {other} as well; accepted: each tensor in one file"
                        raise ConfigError("model", str(file), reason)
                    stored = tensors.get_slice(name)
                    headers[name] = TensorHeader(name, file, tuple(stored.get_shape()), stored.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ConfigError("model", str(file), f"not a whole safetensors file: {error}{lfs_advice(file)}") from error
    return headers


def _check(slots: Mapping[str, WeightSlot], headers: Mapping[str, TensorHeader], checkpoint_dir: Path) -> None:
    missing = [name for name, slot in slots.items() if name not in headers and not slot.is_optional]
    if missing:
        reason = f"{_listed(missing)} missing from the checkpoint{_in_place_of(missing[0], slots, headers)}"
        raise ConfigError("model", str(checkpoint_dir), reason)
    unexpected = [name for name in headers if name not in slots]
    if unexpected:
        reason = f"{_listed(unexpected)} unexpected: config.json implies no such"
        raise ConfigError("model", str(checkpoint_dir), reason)
    for name, header in headers.items():
        slot = slots[name]
        if long_axes(header.shape) != long_axes(slot.shape):
            shapes = f"has shape {list(header.shape)}, config.json implies {list(slot.shape)}"
            raise ConfigError("model", str(header.file), f"tensor {name} {shapes}")
        if header.dtype not in slot.dtypes:
            accepted = f"accepted: {', '.join(slot.dtypes)}"
            raise ConfigError("model", str(header.file), f"tensor {name} has type {header.dtype}; {accepted}")


def _in_place_of(name: str, slots: Mapping[str, WeightSlot], headers: Mapping[str, TensorHeader]) -> str:
    """The stored tensors of a module whose form in the files contradicts config.json, for an error."""
    module = name.rpartition(".")[0]
    others = [other for other in headers if other.rpartition(".")[0] == module and other not in slots]
    return f"; of that module it has {_listed(others)}" if others else ""


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:_NUM_NAMED])}{more}"


def _stream(slots: Mapping[str, WeightSlot], headers: Mapping[str, TensorHeader], parallel: Parallel) -> None:
    """Load indices first, then file by file in the order of the slots, so that merged layers are completed and packed
    one after another."""
    stored = {name: slot for name, slot in slots.items() if name in headers}
    for is_index in (True, False):
        chosen = {name: slot for name, slot in stored.items() if slot.is_index == is_index}
        for file in dict.fromkeys(headers[name].file for name in chosen):
            own = {headers[name].name: slot for name, slot in chosen.items() if headers[name].file == file}
            _load_file(file, own, parallel)


def _load_file(file: Path, slots: Mapping[str, WeightSlot], parallel: Parallel) -> None:
    with safe_open(file, framework="pt") as tensors:
        for name, slot in slots.items():
            try:
                slot.load(tensors.get_tensor(name).reshape(slot.shape))  # of equal long axes
            except ValueError as error:
                raise ConfigError("model", str(file), f"tensor {name} {error}") from error
            parallel.note(name)
