"""Parts of layers that lists in quantization_config leave unquantised, though others are quantised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slipstream.nn.hf_config import QUANTIZATION, HFConfig
from slipstream.nn.layer_spec import DenseSpec, LayerSpec
from slipstream.nn.models.quantization import modules_left_out
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_names import Names, module_name, tensor_name


def with_plain_parts(config: HFConfig, names: Names, spec: DecoderSpec) -> DecoderSpec:
    """The spec with the layers' plain parts. names: the family's.

    Raises ConfigError where parts that are multiplied as one differ.
    """
    text = config.section("text_config")
    section = config.section(QUANTIZATION) or (None if text is None else text.section(QUANTIZATION))
    if section is None:
        return spec

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        plain: set[str] = set()
        for parts, is_of_experts in products(layer):
            stored = spec.expert_format if is_of_experts else spec.stored_format
            if stored is None:
                continue
            modules = dict.fromkeys(tensor_name(names, part, index) for part in parts)
            left_out = modules_left_out(section, modules)
            kept = [module for module in modules if module not in left_out]
            if left_out and kept:
                module, key = next(iter(left_out.items()))
                raise section.error(key, f"leaves {module} unquantised, not {kept[0]}; they are multiplied as one")
            if left_out:
                plain |= {module_name(part) for part in parts}
        return replace(layer, plain=frozenset(plain))

    return spec.map_layers(change)


def products(layer: LayerSpec) -> Iterator[tuple[list[str], bool]]:
    """(the parts that are held as one, whether they are those of the experts)."""
    attention, mlp = layer.attention, layer.mlp
    linears = [*attention.linears, *(() if attention.kv_b is None else (attention.kv_b,))]
    if isinstance(mlp, DenseSpec):
        linears += mlp.linears
    else:
        linears += () if mlp.shared is None else mlp.shared.linears
        yield [part for linear in (mlp.gate_up, mlp.down) for part, _ in linear.parts], True
    for linear in linears:
        yield [part for part, _ in linear.parts], False
