"""4-bit weights as AWQ, GPTQ and compressed-tensors checkpoints store them -> the canonical form of ops.Int4Weight.

Each module stores several tensors; every one is turned into rows of one canonical tensor by itself, on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.quant.method import SHAPE, CheckpointTensors, StoredTensor
from slipstream.nn.stored_format import StoredFormat
from slipstream.nn.weight_slot import FLOAT_DTYPES

WORDS, INDICES = ("I32",), ("I32", "I64")
CODES_PER_WORD = 8
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # the nibble of a word that holds its n-th column
SYMMETRIC_ZERO = 8
# suffix of a stored tensor -> (canonical tensor, its rows from the stored tensor)
Decoders = dict[str, tuple[str, Callable[[Tensor], Tensor]]]


@dataclass(frozen=True)
class Packing:
    """tensors: what is stored for a part of `rows` x `columns` in so many groups. decoders: how it is read."""

    tensors: Callable[[StoredFormat, int, int, int], CheckpointTensors]
    decoders: Callable[[StoredFormat], Decoders]


def _nibbles(words: Tensor) -> Tensor:
    """int32 [..., n] -> uint8 codes [..., 8 n], lowest bits first."""
    return ops.unpack_int4(words.contiguous().view(torch.uint8))


def _along_groups(stored: StoredFormat, axis: int) -> tuple[int | None, int]:
    """(axis of groups, input features of one); one group a row is the same for all input features."""
    return (axis, stored.group_size) if stored.group_size else (None, 1)


def _group_index(stored: StoredFormat, columns: int) -> StoredTensor:
    """The group of each input feature; files whose groups are in order may leave it out."""
    is_optional = not stored.act_order
    return StoredTensor(
        (columns,), INDICES, None, 0, names_groups_of=stored.group_size, is_index=True, is_optional=is_optional
    )


def _column_words(stored: StoredFormat, rows: int, columns: int, num_groups: int) -> CheckpointTensors:
    """AWQ: everything transposed, words along output features."""
    words = rows // CODES_PER_WORD
    (groups, size), unit = _along_groups(stored, 0), CODES_PER_WORD
    return {
        "qweight": StoredTensor((columns, words), WORDS, 1, 0, unit),
        "qzeros": StoredTensor(
            (num_groups, words), WORDS, 1, groups, CODES_PER_WORD, size, is_index=not stored.has_zeros
        ),
        "scales": StoredTensor((num_groups, rows), FLOAT_DTYPES, 1, groups, 1, size),
    }


def _read_awq(stored: StoredFormat) -> Decoders:
    def codes(words: Tensor) -> Tensor:
        return _nibbles(words).unflatten(1, (-1, CODES_PER_WORD))[..., AWQ_PLACES].flatten(1).t()

    return {
        "qweight": ("packed", lambda words: ops.pack_int4(codes(words))),
        "qzeros": ("zeros", codes),
        "scales": ("scales", lambda scales: scales.t()),
    }


def _row_words(stored: StoredFormat, rows: int, columns: int, num_groups: int) -> CheckpointTensors:
    """GPTQ: transposed, weights' words along input features, zero-points' along output features."""
    return {
        **_column_words(stored, rows, columns, num_groups),
        "qweight": StoredTensor((columns // CODES_PER_WORD, rows), WORDS, 1, 0, 1, CODES_PER_WORD),
        "g_idx": _group_index(stored, columns),
    }


def _read_gptq(stored: StoredFormat) -> Decoders:
    # version 1 subtracts one from every zero-point, by whole words: only their sum undoes what overflowed
    ones = 0x11111111 if stored.packing == "gptq" else 0

    def zeros(words: Tensor) -> Tensor:
        found = _nibbles(words + ones).t()
        if not stored.has_zeros and (found != SYMMETRIC_ZERO).any():
            raise ValueError(f"holds zero-points other than {SYMMETRIC_ZERO}, config.json says sym: true")
        return found

    return {
        "qweight": ("packed", lambda words: words.t().contiguous().view(torch.uint8)),
        "qzeros": ("zeros", zeros),
        "scales": ("scales", lambda scales: scales.t()),
        "g_idx": ("group_of_column", lambda index: index),
    }


def _plain_words(stored: StoredFormat, rows: int, columns: int, num_groups: int) -> CheckpointTensors:
    """compressed-tensors: as the weight lies, words along input features, zero-points' along output features."""
    groups, size = _along_groups(stored, 1)
    tensors: CheckpointTensors = {
        "weight_packed": StoredTensor((rows, columns // CODES_PER_WORD), WORDS, 0, 1, 1, CODES_PER_WORD),
        "weight_scale": StoredTensor((rows, num_groups), FLOAT_DTYPES, 0, groups, 1, size),
        SHAPE: StoredTensor((2,), INDICES, says_shape=(rows, columns), is_index=True),
    }
    if stored.has_zeros:
        tensors["weight_zero_point"] = StoredTensor(
            (rows // CODES_PER_WORD, num_groups), WORDS, 0, groups, CODES_PER_WORD, size
        )
    if stored.act_order:
        tensors["weight_g_idx"] = _group_index(stored, columns)
    return tensors


def _read_compressed_tensors(stored: StoredFormat) -> Decoders:
    return {
        "weight_packed": ("packed", lambda words: words.contiguous().view(torch.uint8)),
        "weight_scale": ("scales", lambda scales: scales),
        "weight_zero_point": ("zeros", lambda words: _nibbles(words.t()).t()),
        "weight_g_idx": ("group_of_column", lambda index: index),
    }


def _bytes(stored: StoredFormat, rows: int, columns: int, num_groups: int) -> CheckpointTensors:
    """compressed-tensors beside quantised activations: a byte per value, -8 to 7."""
    groups, size = _along_groups(stored, 1)
    return {
        "weight": StoredTensor((rows, columns), ("I8",), 0, 1),
        "weight_scale": StoredTensor((rows, num_groups), FLOAT_DTYPES, 0, groups, 1, size),
    }


def _read_bytes(stored: StoredFormat) -> Decoders:
    return {
        "weight": ("packed", lambda values: ops.pack_int4((values + SYMMETRIC_ZERO).view(torch.uint8))),
        "weight_scale": ("scales", lambda scales: scales),
    }


PACKINGS = {
    "awq": Packing(_column_words, _read_awq),
    "gptq": Packing(_row_words, _read_gptq),
    "gptq_v2": Packing(_row_words, _read_gptq),
    "compressed-tensors": Packing(_plain_words, _read_compressed_tensors),
    "bytes": Packing(_bytes, _read_bytes),
}
