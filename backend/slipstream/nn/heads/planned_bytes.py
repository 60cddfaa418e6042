"""What heads will hold of the device, from the headers of their files: for the memory plan. Nothing is allocated.

A head's checkpoint fills its tensors one for one, in the model's type, so their shapes are what it takes. Without a
file (dummies) the shapes are the model's. Beside that, drafting on a GPU holds vocabulary matrices in FP8.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from slipstream.nn.heads import eagle, medusa, mtp
from slipstream.nn.heads.draft_vocabulary import vocabulary_method
from slipstream.nn.heads.tensors import read_shapes
from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.quant import QUANT_METHODS, Methods, linear_bytes
from slipstream.nn.spec import DecoderSpec

_OFFSET_BYTES = 8  # of a row of EAGLE-3's vocabulary: which token it stands for


@dataclass(frozen=True)
class HeadBytes:
    """weights: of the head alone. layer: whose keys and values it keeps, if any."""

    weights: int
    layer: DecoderSpec | None = None


@dataclass(frozen=True)
class BesideModel:
    """The model that heads draft for: its shape, how it holds its weights, where and in which type it computes."""

    spec: DecoderSpec
    methods: Methods
    device: torch.device
    dtype: torch.dtype

    def of_vocabulary(self) -> int:
        """A vocabulary matrix of a head's own."""
        spec = LinearSpec(self.spec.hidden_size, (("vocabulary", self.spec.vocab_size),))
        return linear_bytes(vocabulary_method(self.device, self.dtype), spec, self.dtype)

    def of_copy(self) -> int:
        """What draft_vocabulary() makes: a copy in FP8 of a plain matrix, else nothing."""
        plain = QUANT_METHODS.get("none")
        is_plain = self.methods.head is plain and not self.spec.tie_word_embeddings
        return self.of_vocabulary() if is_plain and vocabulary_method(self.device, self.dtype) is not plain else 0


def medusa_bytes(model: BesideModel, folder: Path | None) -> HeadBytes:
    size = model.spec.hidden_size
    if folder is None:
        shapes: dict[str, tuple[int, ...]] = {}
        for head in range(medusa.DUMMY_HEADS):
            shapes |= {
                f"{head}.0.linear.weight": (size, size),
                f"{head}.0.linear.bias": (size,),
                f"{head}.1.weight": (),
            }
    else:
        shapes = medusa.own_names(read_shapes(medusa.FIELD, folder, medusa.is_wanted))
    is_layer = {name: ".linear." in name for name in shapes}
    layers = sum(prod(shape) for name, shape in shapes.items() if is_layer[name])
    num_vocabularies = len(shapes) - sum(is_layer.values())
    return HeadBytes(layers * model.dtype.itemsize + num_vocabularies * model.of_vocabulary())


def mtp_bytes(model: BesideModel, folder: Path | None) -> HeadBytes:
    """folder: None for a dummy."""
    layer, size = mtp.head_spec(model.spec), model.spec.hidden_size
    if folder is None:
        num_parameters, has_head = layer.layers[0].num_parameters + 3 * size + 2 * size**2, False
    else:
        own = mtp.own_names(folder, read_shapes(mtp.FIELD, folder, mtp.is_wanted))
        num_parameters, has_head = sum(map(prod, own.values())), "shared_head.head.weight" in own
    return HeadBytes(num_parameters * model.dtype.itemsize + (0 if has_head else model.of_copy()), layer)


def eagle_bytes(model: BesideModel, folder: Path | None) -> HeadBytes:
    itemsize = model.dtype.itemsize
    if folder is None:
        layer, size, rows = eagle.dummy_spec(model.spec), model.spec.hidden_size, eagle.dummy_vocab_size(model.spec)
        wide = (
            layer.layers[0].attention.qkv.out_features + 2 + 3 * size
        ) * size  # twice the inputs, two more norms, three features
        return HeadBytes((layer.layers[0].num_parameters + wide + rows * size) * itemsize + rows * _OFFSET_BYTES, layer)
    own, is_third = eagle.own_names(read_shapes(eagle.FIELD, folder))
    weights = sum(prod(shape) for name, shape in own.items() if name != "d2t") * itemsize
    if is_third:
        weights += own["lm_head.weight"][0] * _OFFSET_BYTES if "lm_head.weight" in own else 0
    else:
        weights += model.of_copy()
    return HeadBytes(weights, eagle.read_head_spec(folder, model.spec))
