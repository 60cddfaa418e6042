"""Refuses options of a DecoderSpec that no code implements yet, by name and before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream_kernels import ops

from slipstream.core.errors import ConfigError
from slipstream.nn.layer_spec import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec
from slipstream.nn.spec import MAX_POSITIONS, DecoderSpec

QK_NORMS = ("", "head", "flat", "rotated")
NORMS = ("pre", "post", "both")


def check_served(spec: DecoderSpec) -> None:
    """Raise ConfigError for the first unsupported layer, and for more positions than can be told apart."""
    if not spec.layers:
        raise ConfigError("model", spec.architecture, "has no layers")
    if spec.max_model_len > MAX_POSITIONS:
        reason = f"config.json declares {spec.max_model_len} tokens, accepted: up to {MAX_POSITIONS}"
        raise ConfigError("model", spec.architecture, reason)
    for layer in dict.fromkeys(spec.layers):
        for reason in _reasons(layer):
            raise ConfigError("model", spec.architecture, f"layer {spec.layers.index(layer)}: {reason}")


def _reasons(layer: LayerSpec) -> Iterator[str]:
    yield from _unknown("norms", layer.norms, NORMS)
    yield from _of_attention(layer.attention)
    if isinstance(layer.mlp, DenseSpec):
        yield from _unknown("MLP activation", layer.mlp.activation, ops.ACTIVATIONS)
    else:
        yield from _of_experts(layer.mlp)


def _of_attention(attention: AttentionSpec) -> Iterator[str]:
    yield from _unknown("q/k norm", attention.qk_norm, QK_NORMS)
    if attention.output_gate:
        yield "gated attention outputs are not served"
    if attention.latent is not None:
        yield from _of_latent(attention)
    slopes = len(attention.alibi_slopes)
    if slopes not in (0, attention.num_q_heads):
        yield f"{slopes} ALiBi slopes for {attention.num_q_heads} query heads"


def _of_latent(attention: AttentionSpec) -> Iterator[str]:
    options = (attention.sliding_window, attention.soft_cap, *attention.alibi_slopes)
    if any(option is not None for option in options) or attention.qk_norm or attention.sinks:
        yield "windows, caps, ALiBi, sinks and q/k norms of latent attention are not served"
    if attention.rope is None or attention.latent is None or attention.rope.rotary_dim != attention.latent.rope_dim:
        yield "latent attention whose shared key features are not all rotated is not served"


def _of_experts(experts: ExpertsSpec) -> Iterator[str]:
    routing = experts.routing
    if experts.bias and experts.clamped is None:
        yield "biases of experts whose activation is silu are not served"
    refusal = routing.rule.refusal(routing.num_experts_per_token, experts.num_experts)
    if refusal is not None:
        yield f"router: {refusal}"
    if experts.shared is not None:
        yield from _unknown("activation of shared experts", experts.shared.activation, ops.ACTIVATIONS)
    elif experts.shared_gate:
        yield "a gate of shared experts without such experts"


def _unknown(what: str, value: str, accepted: tuple[str, ...]) -> Iterator[str]:
    if value not in accepted:
        yield f"{what} {value!r} is not served; accepted: {', '.join(repr(name) for name in accepted)}"
