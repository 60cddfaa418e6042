"""What families with experts share: which layers have them, and how they are stored beside a model's other layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from slipstream_kernels.ops import MAX_EXPERTS

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import ExpertsSpec, LayerSpec
from slipstream.nn.models.family import LLAMA_NAMES
from slipstream.nn.models.module_lists import ATTENTION_PARTS, MLP_PARTS, linear_modules
from slipstream.nn.models.quantization import read_stored_format
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_names import Name, Names

_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # the families' names for it
DENSE, SPARSE = "dense", "sparse"  # of mlp_layer_types
SHARED = "shared_"  # before the parts of the shared experts' MLP


def expert_names(mlp: str, projection: str = "{part}_proj", shared: str = "") -> Mapping[str, Name]:
    """Llama's names, with those of a router and of experts below `mlp`, and perhaps of shared ones below mlp.shared."""
    names = {
        **LLAMA_NAMES,
        "router": f"{mlp}.gate",
        **{f"expert_{part}": f"{mlp}.experts.{{expert}}.{projection.format(part=part)}" for part in MLP_PARTS},
    }
    if shared:
        names |= {f"{SHARED}{part}": f"{mlp}.{shared}.{projection.format(part=part)}" for part in MLP_PARTS}
    return names


def dense_layers(config: HFConfig, num_layers: int, first: int) -> list[int]:
    """Those that mlp_layer_types calls dense or, without such a list, the first ones.

    first: how many, where first_k_dense_replace does not say.
    """
    kinds = config.strings("mlp_layer_types")
    if not kinds:
        return list(range(min(num_layers, config.integer("first_k_dense_replace", first, minimum=0))))
    if len(kinds) != num_layers or set(kinds) - {DENSE, SPARSE}:
        raise config.error("mlp_layer_types", f"must be {num_layers} of {DENSE} or {SPARSE}")
    return [layer for layer, kind in enumerate(kinds) if kind == DENSE]


def read_groups(config: HFConfig, least_size: int) -> tuple[int, int]:
    """How many groups the experts form, and of how many of them a token's experts are. least_size: of a group.

    Raises ConfigError for groups that the experts do not form, or that have too few of them for a token.
    """
    num_experts, num_groups = config.integer("n_routed_experts"), config.integer("n_group", 1)
    size, rest = divmod(num_experts, num_groups)
    if rest or (num_groups > 1 and size < least_size):
        accepted = f"must divide n_routed_experts={num_experts} into groups of at least {least_size}"
        raise config.error("n_group", accepted)
    topk_groups = config.integer("topk_group", 1)
    if topk_groups > num_groups:
        raise config.error("topk_group", f"must be at most n_group={num_groups}")
    if config.integer("num_experts_per_tok") > topk_groups * size:
        what = f"{topk_groups * size}, the experts of topk_group={topk_groups} of n_group={num_groups} groups"
        raise config.error("num_experts_per_tok", f"must be at most {what}")
    return num_groups, topk_groups


def with_experts(
    config: HFConfig,
    spec: DecoderSpec,
    names: Names,
    experts: ExpertsSpec,
    dense: Collection[int] = (),
    attention_parts: Sequence[str] = ATTENTION_PARTS,
) -> DecoderSpec:
    """The spec with experts in place of the MLP, but in `dense` layers, and the formats that these are stored in."""
    config.choice("hidden_act", ("silu", "swish"), "silu")
    name = next((name for name in _NUM_EXPERTS if config.has(name)), _NUM_EXPERTS[0])
    config.integer(name, experts.num_experts, maximum=MAX_EXPERTS)
    if experts.routing.num_experts_per_token > experts.num_experts:
        limit = f"{config.names.get(name, name)}={experts.num_experts}"
        raise config.error("num_experts_per_tok", f"must be at most {limit}")
    sparse = [layer for layer in range(spec.num_layers) if layer not in dense]

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        return layer if index in dense else replace(layer, mlp=experts)

    modules = linear_modules(names, attention_parts, range(spec.num_layers))
    modules += linear_modules(names, MLP_PARTS, [layer for layer in dense if layer < spec.num_layers])
    if experts.shared is not None:
        modules += linear_modules(names, [f"{SHARED}{part}" for part in MLP_PARTS], sparse)
    stored = read_stored_format(config, modules)
    of_experts = read_stored_format(config, linear_modules(names, MLP_PARTS, sparse, experts.num_experts))
    spec = replace(spec.map_layers(change), stored_format=stored, expert_format=of_experts if sparse else None)
    return spec
