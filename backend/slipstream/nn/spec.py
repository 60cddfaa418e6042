"""DecoderSpec: everything in which served models differ, frozen, with its memory arithmetic; read from config.json.

No weights are read or made here. A family (nn/models/) turns a checkpoint's config into a spec; the decoder, the loader
and the memory plan all take their shapes from it, so that one place knows them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from slipstream_kernels import ops

from slipstream.nn.stored_format import StoredFormat


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the first `rotary_dim` features of a head; the maths is in nn/rotary.py.

    type: default, linear, dynamic, yarn or llama3; the fields below `factor` serve those that need them.
    """

    type: str
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True)
class LinearSpec:
    """One matrix product of the decoder: parts that share an input are merged into it, in order.

    parts: (name, rows) of each; a part is what a checkpoint stores under a name of its own. num_experts: 0, or as many
    products of one shape, one below the other, of which an input takes some; parts are "name.expert" then.
    """

    in_features: int
    parts: tuple[tuple[str, int], ...]
    bias: bool = False
    num_experts: int = 0

    @property
    def out_features(self) -> int:
        return sum(rows for _, rows in self.parts)

    @property
    def num_parameters(self) -> int:
        return self.out_features * (self.in_features + self.bias)


@dataclass(frozen=True)
class ExpertsSpec:
    """A layer's MLPs, of which each token takes num_experts_per_token, those that a router rates highest.

    renormalises: the weights of a token's experts add up to one. stored_format: how the checkpoint stores them.
    """

    num_experts: int
    num_experts_per_token: int
    renormalises: bool = True
    stored_format: StoredFormat | None = None


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer: pre-norm RMSNorm blocks, rotary grouped-query attention, gated MLP.

    experts: of MoE layers, each as large as intermediate_size says; None = one MLP a layer.
    sliding_windows: per layer, the number of latest tokens that a token sees (itself included); None = all.
    dtype: the checkpoint's. eos_token_ids: every id that ends a sequence, from config.json and generation_config.json.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeSpec
    sliding_windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_qkv_inputs: int = 0  # features that queries, keys and values are made of; 0 = hidden_size
    tie_word_embeddings: bool = False
    dtype: torch.dtype = torch.bfloat16
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    experts: ExpertsSpec | None = None
    stored_format: StoredFormat | None = None  # of the linear layers but experts; None = not quantised

    @property
    def max_model_len(self) -> int:
        """The longest sequence (tokens) the checkpoint is declared for, its rope scaling included.

        linear and dynamic stretch max_position_embeddings, yarn its original length; a llama3 config states the
        stretched length already.
        """
        if self.rope.type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.type == "yarn":
            stretched = int(self.rope.original_max_position_embeddings * self.rope.factor)
            return max(self.max_position_embeddings, stretched)
        return self.max_position_embeddings

    @property
    def qkv(self) -> LinearSpec:
        kv = self.num_kv_heads * self.head_dim
        parts = (("q", self.num_q_heads * self.head_dim), ("k", kv), ("v", kv))
        return LinearSpec(self.num_qkv_inputs or self.hidden_size, parts, self.qkv_bias)

    @property
    def o(self) -> LinearSpec:
        return LinearSpec(self.num_q_heads * self.head_dim, (("o", self.hidden_size),), self.o_bias)

    @property
    def gate_up(self) -> LinearSpec:
        parts = (("gate", self.intermediate_size), ("up", self.intermediate_size))
        return LinearSpec(self.hidden_size, parts, self.mlp_bias)

    @property
    def down(self) -> LinearSpec:
        return LinearSpec(self.intermediate_size, (("down", self.hidden_size),), self.mlp_bias)

    @property
    def router(self) -> LinearSpec:
        """Of MoE layers."""
        assert self.experts is not None
        return LinearSpec(self.hidden_size, (("router", self.experts.num_experts),))

    @property
    def expert_gate_up(self) -> LinearSpec:
        return self._of_experts(self.gate_up)

    @property
    def expert_down(self) -> LinearSpec:
        return self._of_experts(self.down)

    def _of_experts(self, linear: LinearSpec) -> LinearSpec:
        assert self.experts is not None
        count = self.experts.num_experts
        parts = tuple((f"{name}.{expert}", rows) for expert in range(count) for name, rows in linear.parts)
        return replace(linear, parts=parts, num_experts=count)

    @property
    def lm_head(self) -> LinearSpec:
        return LinearSpec(self.hidden_size, (("lm_head", self.vocab_size),))

    @property
    def layer_linears(self) -> tuple[LinearSpec, ...]:
        """The products of one layer that a quantisation method holds."""
        if self.experts is None:
            return (self.qkv, self.o, self.gate_up, self.down)
        return (self.qkv, self.o, self.expert_gate_up, self.expert_down)

    @property
    def num_layer_parameters(self) -> int:
        """Of one layer, norms and router included."""
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        router = 0 if self.experts is None else self.router.num_parameters
        return norms + router + sum(linear.num_parameters for linear in self.layer_linears)

    @property
    def num_parameters(self) -> int:
        """Exact count; tied embeddings count once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * self.num_layer_parameters + self.hidden_size

    def weight_bytes(
        self,
        dtype: torch.dtype,
        linear_bytes: Callable[[LinearSpec], int] | None = None,
        head_bytes: Callable[[LinearSpec], int] | None = None,
    ) -> int:
        """Bytes of all weights held in `dtype`, except linears of layers, and a head of its own, held otherwise."""
        total = self.num_parameters * dtype.itemsize
        for held, linears, count in (
            (linear_bytes, self.layer_linears, self.num_layers),
            (head_bytes, () if self.tie_word_embeddings else (self.lm_head,), 1),
        ):
            if held is not None:
                total += count * sum(held(linear) - linear.num_parameters * dtype.itemsize for linear in linears)
        return total

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one token in all layers, with their scales. dtype: as ops.KvCache names types."""
        return 2 * self.num_layers * self.num_kv_heads * ops.kv_row_bytes(self.head_dim, dtype)


def read_spec(checkpoint_dir: str | Path) -> DecoderSpec:
    """The spec of a checkpoint folder in Hugging Face layout. Reads config.json and generation_config.json only.

    Raises ConfigError for a folder without a readable config.json, an architecture that is not served (lists those that
    are) and every field that this decoder cannot honour.
    """
    from slipstream.nn.hf_config import HFConfig
    from slipstream.nn.models import family_of

    config = HFConfig.read(Path(checkpoint_dir))
    return family_of(config).read_spec(config)
