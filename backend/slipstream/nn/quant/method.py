"""QuantMethod: how the weights of a linear layer are stored, read, cut and held. Unquantised is one of the methods.

A method is stateless; the tensors it makes live in the layer's `weights` dictionary under names only the method knows.
How they are multiplied is not its to say: `finish` hands them to the kernels (ops.linear), which choose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.core.registry import Registry
from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.stored_format import StoredFormat
from slipstream.nn.weight_slot import FLOAT_DTYPES

Weights = dict[str, Tensor]
SHAPE = "weight_shape"  # beside words of compressed-tensors: [out, in] of what they hold


class StoredTensor(NamedTuple):
    """What a checkpoint stores under a suffix: shape, and types as safetensors names them.

    rows_axis, columns_axis: which axis runs along output and along input features, None if none does: by these a stored
    tensor is split among parts and cut among ranks. rows_unit, columns_unit: features of one element along it, more
    than one in words, blocks and groups.
    says_shape: its contents, if they are the shape [rows, columns] of what is stored beside it.
    names_groups_of: its contents are numbers of groups of so many input features, counted from 0.
    is_index: small, and read before all others, so that what it refuses is refused before weights are loaded.
    is_optional: a checkpoint may lack it; such a tensor must be an index.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    rows_axis: int | None = None
    columns_axis: int | None = None
    rows_unit: int = 1
    columns_unit: int = 1
    says_shape: tuple[int, int] | None = None
    names_groups_of: int = 0
    is_index: bool = False
    is_optional: bool = False


CheckpointTensors = dict[str, StoredTensor]  # by suffix: "weight", "bias", …


class QuantMethod(Protocol):
    """Order of calls: supports, create_weights, load for every tensor of every part, finish once.

    Of a MoE layer the weights of all experts are one layer, one below the other: methods serve both alike.
    """

    stored: StoredFormat | None = None  # how the checkpoint stores what it reads; None: not quantised

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """A reason against this device and this activation dtype, or None."""
        return None

    def create_weights(self, spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> Weights:
        """Tensors for all parts of the layer, merged; their contents are loaded later.

        Raises ConfigError if the method cannot hold a layer of this shape.
        """
        ...

    def checkpoint_tensors(self, spec: LinearSpec, rows: int) -> CheckpointTensors:
        """What a checkpoint stores for a part of that many rows."""
        ...

    def load(self, weights: Weights, suffix: str, rows: slice, tensor: Tensor) -> None:
        """Put one tensor of a part, which owns these rows of the merged layer, in its place.

        Raises ValueError with the reason if its contents cannot be served.
        """
        ...

    def written_out_bytes(self, spec: LinearSpec, num_rows: int, device: torch.device, dtype: torch.dtype) -> int:
        """Bytes of a copy of the weights that a product of so many rows on a GPU makes first, to read it whole."""
        return 0

    def split_sums_bytes(self, num_sms: int) -> int:
        """The most that parts of the sums of a dense product take, which CTAs of a GPU with so many SMs share."""
        return 0

    def finish(self, weights: Weights, num_experts: int = 0, dtype: torch.dtype | None = None) -> ops.LinearWeight:
        """All tensors of the layer are loaded: repack them for the device. The largest temporary is one layer.

        dtype: of the activations, on which the layout may depend; None: any.
        """
        ...


QUANT_METHODS: Registry[QuantMethod] = Registry("quantization")
# what weights that are stored in a format are read by, under each name that can multiply them
READERS: dict[str, Callable[[StoredFormat], QuantMethod]] = {}
# from the quantization_config of a checkpoint's config.json, and the names of linear layers that one method holds, to
# how they are stored (None: not quantised), by its quant_method
ConfigReader = Callable[[HFConfig, Sequence[str]], StoredFormat | None]
CONFIG_READERS: dict[str, ConfigReader] = {}
FREE_TOKENS: dict[str, int] = {}  # as `register` says, by name


def register(
    name: str,
    made: QuantMethod,
    free_tokens: int,
    reads: Callable[[StoredFormat], QuantMethod] | None = None,
    config_readers: Mapping[str, ConfigReader] | None = None,
) -> None:
    """Add a method. made: for weights that are quantised as they are loaded. reads: for those that are stored so.

    free_tokens: rows of a decode step that cost about as much as one: peak FLOP/s * bytes per weight / (2 * bytes per
    second) of one H200 (docs/speculation.md).
    """
    QUANT_METHODS.register(name)(made)
    FREE_TOKENS[name] = free_tokens
    if reads is not None:
        READERS[name] = reads
    CONFIG_READERS.update(config_readers or {})


def plain_tensors(spec: LinearSpec, rows: int) -> CheckpointTensors:
    """What unquantised checkpoints store for a part."""
    tensors: CheckpointTensors = {"weight": StoredTensor((rows, spec.in_features), FLOAT_DTYPES, 0, 1)}
    if spec.bias:
        tensors["bias"] = StoredTensor((rows,), FLOAT_DTYPES, 0)
    return tensors


def require_stored_shape(tensor: Tensor, rows: slice, columns: int) -> None:
    """Raise ValueError unless a stored "weight_shape" is what the packed words are read as."""
    expected = [rows.stop - rows.start, columns]
    if tensor.tolist() != expected:
        raise ValueError(f"says {tensor.tolist()}, config.json implies {expected}")


def linear_bytes(method: QuantMethod, spec: LinearSpec, dtype: torch.dtype) -> int:
    """Bytes of a layer's weights as the method holds them beside activations of `dtype`; nothing is allocated."""
    weights = method.create_weights(spec, torch.device("meta"), dtype)
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
