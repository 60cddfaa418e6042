"""Checkpoints that store several of the decoder's parts as one tensor, or in another form: the same weights, bit for
bit, in every format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from paged_forward import PagedForward
from safetensors.torch import load_file, save_file
from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.layer_context import LayerContext
from slipstream.nn.linear import Linear
from slipstream.nn.load import load_model
from slipstream.nn.load_transforms import AddOne, NormaliseRows, Transform
from slipstream.nn.models import llama
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.stored_names import Fused, Names, Stacked, Stored, stored_slots
from slipstream.nn.weight_slot import WeightSlot
from stored_formats import STORED, drawn, linear_spec, method_of
from tiny_checkpoints import make_checkpoint

CPU = torch.device("cpu")
QKV = {part: Fused("attn.qkv", ("q", "k", "v")) for part in "qkv"}


@dataclass(frozen=True)
class Transpose:
    """Stored [in, out]: a transform that changes the shape."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1]

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.t()

    def suffixes(self) -> tuple[str, ...]:
        return ("weight",)


@dataclass(frozen=True)
class PermuteRows:
    """Row i of every len(order) rows is the stored row order[i]: a transform of weights and biases."""

    order: tuple[int, ...]

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(0, (-1, len(self.order)))[:, list(self.order)].flatten(0, 1)

    def suffixes(self) -> tuple[str, ...]:
        return ("weight", "bias")


def make_linear(name: str, bias: bool) -> Linear:
    method = method_of(name)
    return Linear(linear_spec(bias), LayerContext(CPU, torch.float32, method, method))


def held(linear: Linear) -> dict[str, torch.Tensor]:
    """Packed weights of a CPU have no bytes to compare: their product."""
    weights = dict(linear.weights)
    if "packed" in weights and weights["packed"].is_mkldnn:
        weights["packed"] = linear.apply(torch.eye(linear.spec.in_features))
    return weights


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", STORED)
def test_a_fused_tensor_is_its_parts_in_order(name: str, bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    apart, fused = make_linear(name, bias), make_linear(name, bias)
    slots = stored_slots(fused.slots(), QKV, 0)
    stored: dict[str, list[tuple[int | None, torch.Tensor]]] = {}
    for _, suffix, slot in sorted(apart.slots(), key=lambda part: not part[2].is_index):
        known = stored.get(f"attn.qkv.{suffix}")
        is_shared = known is not None and slot.rows_axis is None and slot.says_shape is None  # a scale of the tensor
        tensor = known[0][1] if known is not None and is_shared else drawn(slot, suffix, generator)
        slot.load(tensor)
        stored.setdefault(f"attn.qkv.{suffix}", []).append((slot.rows_axis, tensor))
    assert set(slots) == set(stored)
    for key, slot in slots.items():
        axis, tensors = stored[key][0][0], [tensor for _, tensor in stored[key]]
        whole = tensors[0] if axis is None else torch.cat(tensors, dim=axis)
        if slot.says_shape is not None:
            whole = torch.tensor([512, 256])
        assert tuple(whole.shape) == slot.shape
        slot.load(whole)
    for (key, ours), theirs in zip(held(fused).items(), held(apart).values(), strict=True):
        assert torch.equal(ours.flatten().view(torch.uint8), theirs.flatten().view(torch.uint8)), key


def test_experts_of_one_tensor_have_a_module_s_names_or_the_tensor_s_own() -> None:
    names = {"expert_gate": Stacked("moe.in", ("gate",)), "expert_up": Stacked("moe.up", ("up",), is_module=True)}
    parts = [
        (f"{part}.{expert}", suffix, WeightSlot((4, 2), torch.empty(4, 2).copy_))
        for part in ("gate", "up")
        for expert in range(3)
        for suffix in ("weight", "weight_scale")
    ]
    slots = stored_slots(parts, names, 0)
    assert list(slots) == ["moe.in", "moe.in_weight_scale", "moe.up.weight", "moe.up.weight_scale"]
    assert {slot.shape for slot in slots.values()} == {(3, 4, 2)}


def test_a_fused_shape_that_is_another_is_refused() -> None:
    slots = stored_slots(make_linear("int4-packed", False).slots(), QKV, 0)
    with pytest.raises(ValueError, match=r"says \[256, 256\], config.json implies \[512, 256\]"):
        slots["attn.qkv.weight_shape"].load(torch.tensor([256, 256]))


def test_a_format_whose_words_hold_rows_of_both_parts_is_refused() -> None:
    names = {part: Fused("attn.qkv", ("q", "k", "v"), "interleaved") for part in "qkv"}
    with pytest.raises(ConfigError, match="rows stored as interleaved of this format do not come apart"):
        stored_slots(make_linear("awq", False).slots(), names, 0)
    quantised = {part: Stored(f"attn.{part}", (Transpose(),)) for part in "qkv"}
    with pytest.raises(ConfigError, match="is quantised, and needs Transpose"):
        stored_slots(make_linear("awq", False).slots(), quantised, 0)


ATTENTION, MLP = "model.layers.{layer}.self_attn", "model.layers.{layer}.mlp"
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def each(name: str, transforms: tuple[Transform, ...]) -> Names:
    return {name: Stored(str(LLAMA_NAMES[name]), transforms)}


def fuse(tensors: dict[str, torch.Tensor], split: str) -> dict[str, torch.Tensor]:
    """The same tensors with q, k and v as one, and gate and up."""
    for layer in range(3):
        for module, parts, groups in (("self_attn.qkv", "qkv", 2), ("mlp.gate_up", ("gate", "up"), 72)):
            for suffix in ("weight", "bias"):
                prefix = f"model.layers.{layer}.{module.partition('.')[0]}"
                own = [tensors.pop(f"{prefix}.{part}_proj.{suffix}") for part in parts]
                if split == "rows":
                    groups = 1
                by_group = [tensor.unflatten(0, (groups, -1)) for tensor in own]
                tensors[f"model.layers.{layer}.{module}.{suffix}"] = torch.cat(by_group, dim=1).flatten(0, 1)
    return tensors


def fused_names(split: str) -> Names:
    heads, pairs = ("rows", "rows") if split == "rows" else ("heads", "interleaved")
    return {
        **{part: Fused(f"{ATTENTION}.qkv", ("q", "k", "v"), heads) for part in "qkv"},
        **{part: Fused(f"{MLP}.gate_up", ("gate", "up"), pairs) for part in ("gate", "up")},
    }


def transformed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the transforms below turn into the same tensors again."""
    for name in list(tensors):
        if name.endswith("down_proj.weight"):
            tensors[name] = tensors[name].t()
        elif "q_proj" in name:
            tensors[name] = tensors[name].unflatten(0, (-1, 8))[:, torch.tensor(ORDER).argsort()].flatten(0, 1)
        elif "input_layernorm" in name:
            tensors[name] = tensors[name] - 1
    return tensors


TRANSFORMS = {
    **each("down", (Transpose(),)),
    **each("q", (PermuteRows(ORDER),)),
    **each("input_norm", (AddOne(),)),
}
LAYOUTS = {
    "fused in order": (lambda tensors: fuse(tensors, "rows"), fused_names("rows")),
    "fused by heads and row by row": (lambda tensors: fuse(tensors, "groups"), fused_names("groups")),
    "transformed": (transformed, TRANSFORMS),
}


@pytest.fixture(params=list(LAYOUTS))
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """(a checkpoint in Llama's layout, the same in another)."""
    change, names = LAYOUTS[request.param]
    plain, other = make_checkpoint("llama-biases", tmp_path / "plain").path, tmp_path / "other"
    other.mkdir()
    config = (plain / "config.json").read_text()
    (other / "config.json").write_text(config.replace("LlamaForCausalLM", "TestLayout"))
    tensors = change(load_file(plain / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, other / "model.safetensors")
    FAMILIES.register("TestLayout")(Family(llama.read_spec, {**LLAMA_NAMES, **names}))
    try:
        yield plain, other
    finally:
        del FAMILIES._entries["TestLayout"]


@pytest.mark.parametrize("quantization", ["none", "wint8"])
def test_a_checkpoint_of_another_layout_is_the_same_model(stored: tuple[Path, Path], quantization: str) -> None:
    prompt = [3, 50, 17, 80, 9, 4]
    found = []
    for path in stored:
        decoder = load_model(ModelConfig(model=str(path), device="cpu", quantization=quantization))
        found.append(PagedForward(decoder, [prompt]).run([len(prompt)])[0])
    rounds = isinstance(FAMILIES.get("TestLayout").names["input_norm"], Stored)  # w - 1 + 1
    assert torch.allclose(*found, atol=2e-5) if rounds else torch.equal(*found)
    dummy = ModelConfig(model=str(stored[1]), device="cpu", load_format="dummy")
    assert all(norm.weight.mean() == 1 for layer in load_model(dummy).layers for _, norm in layer.norms())


def test_rows_of_a_head_are_normalised(tmp_path: Path) -> None:
    plain = make_checkpoint("llama-biases", tmp_path)
    names = {**LLAMA_NAMES, **each("lm_head", (NormaliseRows(),))}
    FAMILIES.register("TestLayout")(Family(llama.read_spec, names))
    try:
        config = (tmp_path / "config.json").read_text()
        (tmp_path / "config.json").write_text(config.replace("LlamaForCausalLM", "TestLayout"))
        decoder = load_model(ModelConfig(model=str(tmp_path), device="cpu"))
    finally:
        del FAMILIES._entries["TestLayout"]
    head = plain.model.lm_head.weight
    with torch.no_grad():
        head.div_(head.norm(dim=1, keepdim=True))
    (ours,) = PagedForward(decoder, [[3, 5, 9]]).run([3])
    assert torch.allclose(ours, plain.logits([3, 5, 9]), atol=1e-5)
