"""DecoderSpec: the frozen description of a model, with its memory arithmetic.

No weights here, and no files. nn/read_spec.py reads a checkpoint's; the decoder, the loader and the memory plan take
all shapes from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from slipstream.nn.layer_spec import AttentionSpec, ExpertsSpec, LayerSpec, LinearSpec
from slipstream.nn.parallel import Parallel
from slipstream.nn.stored_format import StoredFormat

MAX_POSITIONS = 1 << 24  # angles are computed in fp32, which holds every integer up to here


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer: an embedding, layers, a final RMSNorm and a head.

    layers: in order; all equal in most models. dtype: the checkpoint's.
    eos_token_ids: every id that ends a sequence, from config.json and generation_config.json.
    embedding_scale: multiplies embeddings, rounded to the model's dtype. logit_scale: multiplies the logits, which then
    become logit_soft_cap · tanh(logit / logit_soft_cap).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    norm_eps: float
    tie_word_embeddings: bool = False
    dtype: torch.dtype = torch.bfloat16
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    stored_format: StoredFormat | None = None  # of linear layers except experts; None = not quantised
    expert_format: StoredFormat | None = None  # of the experts, if any
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The distinct attention specs of the layers, in order."""
        return tuple(dict.fromkeys(layer.attention for layer in self.layers))

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.mlp, ExpertsSpec) for layer in self.layers)

    @property
    def max_model_len(self) -> int:
        """The longest sequence (tokens) that the checkpoint declares, including rope scaling."""
        declared = self.max_position_embeddings
        ropes = {attention.rope for attention in self.attentions if attention.rope is not None}
        return min((rope.max_model_len(declared) for rope in ropes), default=declared)

    @property
    def lm_head(self) -> LinearSpec:
        return LinearSpec(self.hidden_size, (("lm_head", self.vocab_size),), shard="vocabulary")

    @property
    def layer_linears(self) -> tuple[LinearSpec, ...]:
        """The linears of all layers that a quantisation method holds."""
        return tuple(linear for layer in self.layers for linear in layer.linears)

    @property
    def num_parameters(self) -> int:
        """Exact count; tied embeddings count once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + sum(layer.num_parameters for layer in self.layers) + self.hidden_size

    @property
    def attention_parity(self) -> float:
        """Cached tokens at which a new token's attention costs as many FLOP as its products; inf without full layers.

        A window's attention counts as a product: its cost has a bound."""
        products = per_cached_token = 0
        for layer in self.layers:
            attention, mlp = layer.attention, layer.mlp
            per_key = 4 * attention.num_q_heads * attention.head_dim
            weights = sum(linear.num_parameters for linear in attention.linears) + 3 * mlp.hidden_size * mlp.width
            products += 2 * weights + per_key * (attention.sliding_window or 0)
            per_cached_token += 0 if attention.sliding_window else per_key
        return products / per_cached_token if per_cached_token else math.inf

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all weights without quantisation."""
        return self.num_parameters * dtype.itemsize

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's planes in the caches of all layers. dtype: as ops.KvCache names types."""
        return sum(layer.attention.kv_layout(dtype).bytes_per_token for layer in self.layers)

    def of_rank(self, parallel: Parallel) -> DecoderSpec:
        """The model with a rank's heads: what caches and attention are sized by. Weights are those of the whole."""
        return self if parallel.size == 1 else self.map_attention(lambda attention: attention.of_rank(parallel))

    def of_stage(self, parallel: Parallel) -> DecoderSpec:
        """The model with the layers of a rank's stage only."""
        own = parallel.own_layers(self.num_layers)
        return replace(self, layers=self.layers[own.start : own.stop]) if parallel.layers else self

    def map_layers(self, change: Callable[[int, LayerSpec], LayerSpec]) -> DecoderSpec:
        """A copy with every layer replaced by change(index, layer)."""
        return replace(self, layers=tuple(change(index, layer) for index, layer in enumerate(self.layers)))

    def map_attention(self, change: Callable[[AttentionSpec], AttentionSpec]) -> DecoderSpec:
        return self.map_layers(lambda _, layer: replace(layer, attention=change(layer.attention)))
