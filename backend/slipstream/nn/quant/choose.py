"""Which method a model's linear layers use: the configured one, or the one its checkpoint is stored in."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.quant.int4 import Int4
from slipstream.nn.quant.invariant import invariant
from slipstream.nn.quant.method import FREE_TOKENS, QUANT_METHODS, READERS, QuantMethod
from slipstream.nn.spec import DecoderSpec

AUTO, UNQUANTIZED = "auto", "none"
CHANNEL = -1  # quantization_group_size: one group a row
SAME_WEIGHTS = (("wint8", "w8a8_int8"), ("wint4", "w4a8_fp8"))
MIXED = {"a8w8_fp8_wint4": ("fp8", "w4a8_fp8")}  # methods of all linears but experts, and of experts
NAMES = (AUTO, *QUANT_METHODS.names(), *MIXED)  # that `quantization` takes
FREE_TOKENS.update({name: FREE_TOKENS[experts] for name, (_, experts) in MIXED.items()})


@dataclass(frozen=True)
class Methods:
    """name: what they are together. experts: of MoE layers; linears: of all others but the head.

    plain: of what is never quantised, such as routers.
    """

    name: str
    linears: QuantMethod
    head: QuantMethod
    experts: QuantMethod
    plain: QuantMethod


def choose_methods(config: ModelConfig, spec: DecoderSpec) -> Methods:
    """The methods of a model's layers, as choose_method says, and of its experts.

    Raises ConfigError for a name of none, mixed ones of a model without experts, and for what deterministic mode
    cannot have.
    """
    if config.quantization not in NAMES:
        raise ConfigError("quantization", config.quantization, f"accepted: {', '.join(NAMES)}")
    name, *methods = _by_kind(config, spec)
    methods.append(QUANT_METHODS.get(UNQUANTIZED))
    if config.deterministic:
        methods = [invariant(name, method) for method in methods]
    return Methods(name, *methods)


def _by_kind(config: ModelConfig, spec: DecoderSpec) -> tuple[str, QuantMethod, QuantMethod, QuantMethod]:
    """(name, methods of the layers' linears, of lm_head and of experts)."""
    name, mixed = config.quantization, MIXED.get(config.quantization)
    if spec.has_experts and spec.expert_format != spec.stored_format:
        return _stored_mixture(config, spec)
    if mixed is None:
        name, linears, head = choose_method(config, spec)
        return name, linears, head, linears
    if not spec.has_experts:
        raise ConfigError("quantization", name, f"{spec.architecture} has no experts; accepted: {mixed[0]}")
    if spec.stored_format is not None:
        raise ConfigError("quantization", name, f"the checkpoint is stored in {spec.stored_format.method}")
    _, linears, head = choose_method(replace(config, quantization=mixed[0], quantization_group_size=0), spec)
    return name, linears, head, _made_at_load(mixed[1], config.quantization_group_size)


def _stored_mixture(config: ModelConfig, spec: DecoderSpec) -> tuple[str, QuantMethod, QuantMethod, QuantMethod]:
    """The same of a checkpoint whose experts are stored otherwise than its other linears, or alone quantised.

    Without a name of its own it has that of the experts, which are nearly all of the weights.
    """
    asked, stored = config.quantization, spec.expert_format
    own = replace(config, quantization=AUTO, quantization_group_size=0)
    of_linears, linears, head = choose_method(own, spec)
    of_experts, experts, _ = choose_method(replace(own, quantize_lm_head=False), replace(spec, stored_format=stored))
    pair = (of_linears, of_experts)
    name = next((name for name, methods in MIXED.items() if methods == pair), of_experts)
    if asked not in (AUTO, name):
        reason = f"the checkpoint stores experts in {of_experts}, other layers in {of_linears}; accepted: {AUTO}"
        raise ConfigError("quantization", asked, reason)
    size = (stored.group_size or CHANNEL) if stored is not None and stored.scales == "group" else 0
    if config.quantization_group_size not in (0, size):
        raise ConfigError("quantization_group_size", config.quantization_group_size, f"the checkpoint has {size}")
    return name, linears, head, experts


def choose_method(config: ModelConfig, spec: DecoderSpec) -> tuple[str, QuantMethod, QuantMethod]:
    """(name, method of the layers' linears, method of lm_head).

    lm_head stays unquantised unless the checkpoint stores it quantised, or `quantize_lm_head` asks for it; of one tied
    to the embedding that makes a second, quantised copy. Dummy weights have no stored layout: they are quantised as
    they are drawn. Raises ConfigError for an unknown method, one that cannot multiply the checkpoint's weights, and
    wishes that the method has no use for.
    """
    stored, asked = spec.stored_format, "" if config.quantization == AUTO else config.quantization
    if stored is None:
        name = asked or UNQUANTIZED
        made = method = _made_at_load(name, config.quantization_group_size)
    else:
        name = asked or stored.method
        accepted = next((names for names in SAME_WEIGHTS if stored.method in names), (stored.method,))
        if name not in accepted:
            reason = f"the checkpoint is stored in {stored.method}; accepted: {', '.join((AUTO, *accepted))}"
            raise ConfigError("quantization", asked, reason)
        if config.quantization_group_size not in (0, stored.group_size or CHANNEL):
            size = stored.group_size or CHANNEL
            raise ConfigError("quantization_group_size", config.quantization_group_size, f"the checkpoint has {size}")
        made = _made_at_load(name, (stored.group_size or CHANNEL) if stored.scales == "group" else 0)
        method = made if config.load_format == "dummy" else READERS[name](stored)
    if stored is not None and stored.quantized_head and not spec.tie_word_embeddings:
        return name, method, method
    if config.quantize_lm_head and name == UNQUANTIZED:
        raise ConfigError("quantize_lm_head", True, "needs a quantization other than none")
    return name, method, made if config.quantize_lm_head else QUANT_METHODS.get(UNQUANTIZED)


def _made_at_load(name: str, group_size: int) -> QuantMethod:
    """The method for weights that are quantised as they are loaded. group_size: 0 is the method's own, -1 a row."""
    method = QUANT_METHODS.get(name)
    if not group_size:
        return method
    if not isinstance(method, Int4):
        grouped = ", ".join(known for known in QUANT_METHODS.names() if isinstance(QUANT_METHODS.get(known), Int4))
        raise ConfigError("quantization_group_size", group_size, f"{name} has no groups; those of {grouped} have")
    return replace(method, group_size=0 if group_size == CHANNEL else group_size)
