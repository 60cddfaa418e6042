"""Runs an unquantised decoder over calibration text layer by layer, and records what its linear layers see.

One layer at a time, so that a layer is quantised on the inputs that the quantised layers before it give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from slipstream.nn.attention import ATTENTION_BACKENDS
from slipstream.nn.decoder import Decoder, DecoderLayer
from slipstream.nn.kv_layout import LayerCache
from slipstream.nn.layer_context import LayerContext
from slipstream.nn.linear import ExpertLinear, Linear
from slipstream.nn.quant.method import Weights
from slipstream.nn.quant.unquantized import Unquantized
from slipstream.nn.read_spec import read_spec
from slipstream.nn.weights import load_checkpoint
from slipstream_kernels import ops
from torch import Tensor

from quantization.folding import kept_linears
from quantization.forward import BLOCK_SIZE, empty_caches, window_step


@dataclass
class InputStatistics:
    """Sums over a layer's inputs: gram = sum of x xᵀ [in, in] fp32, largest magnitude per feature, tokens seen."""

    gram: Tensor
    largest: Tensor
    num_tokens: int = 0

    def add(self, x: Tensor) -> None:
        if not len(x):  # an expert that no token of the batch chose
            return
        wide = x.float()
        self.gram.addmm_(wide.t(), wide)
        torch.maximum(self.largest, wide.abs().amax(0), out=self.largest)
        self.num_tokens += x.shape[0]

    @classmethod
    def empty(cls, size: int, device: torch.device) -> InputStatistics:
        return cls(torch.zeros(size, size, device=device), torch.zeros(size, device=device))

    @classmethod
    def together(cls, parts: list[InputStatistics]) -> InputStatistics:
        """The statistics of all the inputs that the parts saw."""
        if len(parts) == 1:
            return parts[0]
        largest = torch.stack([part.largest for part in parts]).amax(0)
        gram = torch.zeros_like(parts[0].gram)
        for part in parts:
            gram += part.gram
        return cls(gram, largest, sum(part.num_tokens for part in parts))

    def rescaled(self, factors: Tensor) -> InputStatistics:
        """As if every input feature had been divided by its factor."""
        gram = self.gram / (factors[:, None] * factors)
        return InputStatistics(gram, self.largest / factors, self.num_tokens)


Seen = list[InputStatistics]  # of a linear; of experts one each


class AsLoaded(Unquantized):
    """Unquantised weights that stay as they were loaded: they will be changed."""

    def finish(self, weights: Weights, num_experts: int = 0, dtype: torch.dtype | None = None) -> ops.LinearWeight:
        return ops.plain_weight(weights["weight"], weights.get("bias"))


def load_recorded(model: Path, device: torch.device, dtype: torch.dtype) -> Decoder:
    """The checkpoint with weights that may be changed. Raises ConfigError as loading does."""
    spec = read_spec(model)
    _, backend = ATTENTION_BACKENDS.select(lambda entry: entry.supports(spec, device, dtype), None)
    as_loaded = AsLoaded()
    context = LayerContext(device, dtype, as_loaded, Unquantized() if spec.tie_word_embeddings else as_loaded)
    decoder = Decoder(spec, context, backend(spec), spec.max_model_len)
    for layer in decoder.layers:
        for linear in kept_linears(layer).values():
            linear.method = as_loaded
    load_checkpoint(decoder, model)
    return decoder


@dataclass
class _Batch:
    """A batch of windows on its way through the layers."""

    windows: Tensor
    hidden: Tensor
    residual: Tensor | None = None


class LayerWalk:
    """windows: [num_windows, window_tokens]. `layer` is the one that `record` and `pass_on` run."""

    def __init__(self, decoder: Decoder, windows: Tensor, batch_windows: int) -> None:
        self.decoder = decoder
        blocks = -(-windows.shape[1] // BLOCK_SIZE)
        self.cache = empty_caches(decoder, batch_windows * blocks, "auto")[0]
        self.batches = []
        for batch in windows.split(batch_windows):
            on_device = batch.to(decoder.context.device)
            self.batches.append(_Batch(on_device, decoder.embedding(on_device.reshape(-1))))

    @torch.inference_mode()
    def record(self, layer: DecoderLayer) -> dict[Linear, Seen]:
        """What each linear of the layer sees, with the layer's weights as they are now."""
        with ExitStack() as stack:
            seen = {linear: stack.enter_context(recording(linear)) for linear in quantised_linears(layer)}
            for batch in self.batches:
                self._run(layer, batch)
        return seen

    @torch.inference_mode()
    def pass_on(self, layer: DecoderLayer, look: Callable[[LayerCache], None] | None = None) -> None:
        """Make the layer's outputs the next one's inputs. look: is shown the cache after each batch."""
        for batch in self.batches:
            batch.hidden, batch.residual = self._run(layer, batch)
            if look is not None:
                look(self.cache)

    def _run(self, layer: DecoderLayer, batch: _Batch) -> tuple[Tensor, Tensor]:
        step = self.decoder.backend.plan(window_step(batch.windows, 0, batch.windows.shape[1]))
        return layer(batch.hidden, batch.residual, step, self.cache)


def quantised_linears(layer: DecoderLayer) -> tuple[Linear, ...]:
    """Those that a method holds: all but a router, the gate of shared experts, and kv_b of latent attention."""
    kept = kept_linears(layer).values()
    return tuple(linear for linear in layer.linears() if isinstance(linear, Linear) and linear not in kept)


@contextmanager
def recording(linear: Linear) -> Iterator[Seen]:
    """Statistics of the linear's inputs while the context is open."""
    device, count = linear.weights["weight"].device, linear.spec.num_experts or 1
    statistics = [InputStatistics.empty(linear.spec.in_features, device) for _ in range(count)]
    apply, apply_gated = linear.apply, linear.apply_gated

    def show(x: ops.Activation) -> Tensor:
        assert isinstance(x, Tensor)
        statistics[0].add(x)
        return x

    own = {"apply": lambda x: apply(show(x)), "apply_gated": lambda x, *how: apply_gated(show(x), *how)}
    if isinstance(linear, ExpertLinear):
        own = {
            "apply_grouped": partial(_show_experts, linear.apply_grouped, statistics),
            "apply_grouped_gated": partial(_show_experts, linear.apply_grouped_gated, statistics),
        }
    linear.__dict__.update(own)  # in the place of the methods
    try:
        yield statistics
    finally:
        for name in own:
            del linear.__dict__[name]


def _show_experts(
    multiply: Callable[..., ops.Activation],
    statistics: Seen,
    x: ops.Activation,
    routing: ops.Routing,
    *,
    by_token: bool = False,
    **how: ops.ActivationQuant[ops.Activation],
) -> ops.Activation:
    assert isinstance(x, Tensor)
    rows = x[routing.tokens.long()] if by_token else x
    for expert, (start, end) in zip(statistics, pairwise(routing.offsets.tolist())):
        expert.add(rows[start:end])
    return multiply(x, routing, by_token=by_token, **how)
