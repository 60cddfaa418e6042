"""Device memory that a rank takes beside weights and KV pool: what lives at once in its largest step.

Pure arithmetic, once at load.
"""

from __future__ import annotations

import torch
from slipstream_kernels import ops

from slipstream.core.config import EngineConfig
from slipstream.core.drafts import MAX_DRAFT_TOKENS
from slipstream.nn.attention.latent import PREFIX_TOKENS
from slipstream.nn.heads.eagle import NUM_FEATURES
from slipstream.nn.layer_spec import AttentionSpec, DenseSpec, ExpertsSpec, LinearSpec
from slipstream.nn.parallel import Parallel
from slipstream.nn.quant import QuantMethod, choose_methods
from slipstream.nn.rotary import table_bytes
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.graph_memory import graph_memory
from slipstream.worker.graph_shapes import MAX_DECODE_ROWS
from slipstream.worker.hardware import Hardware
from slipstream.worker.sample.logprobs import MAX_PROMPT_ROWS
from slipstream.worker.sample.penalties import history_bytes

# fp32 copies of the logits that sampling holds at once (logits, probabilities, sorted values and indices, mask)
LOGITS_COPIES = 6
# activations of one token that live at once: residual, normed, qkv, attention output; gate, up and their product
HIDDEN_COPIES = 8
INTERMEDIATE_COPIES = 3
MOST_SMS = 132  # of a Hopper GPU, where none is at hand to ask


def workspace_bytes(spec: DecoderSpec, config: EngineConfig, hardware: Hardware, num_groups: int = 1) -> int:
    """Logits, activations of the largest step and of the largest CUDA graph, which keeps them, inputs and outputs of
    graphs (but see graph_memory), weights written out, tables of ropes, tokens of penalised requests.

    num_groups: KV groups."""
    graphs = graph_memory(spec, config, hardware, num_groups)
    most_tokens = config.scheduler.max_num_batched_tokens
    num_tokens = most_tokens + graphs.num_tokens
    num_seqs = config.scheduler.max_num_seqs
    num_verified = min(MAX_DECODE_ROWS, num_seqs * (1 + MAX_DRAFT_TOKENS)) if config.speculation.loaded else 0
    parallel, own = hardware.parallel, spec.of_stage(hardware.parallel)
    num_rows = max(num_seqs, num_verified)
    logits = LOGITS_COPIES * max(num_rows, MAX_PROMPT_ROWS) * spec.vocab_size * 4
    width = max(_activation_width(layer.mlp, parallel) for layer in own.layers)
    attentions = own.of_rank(parallel).attentions
    features = num_tokens * width + max(_latent_features(attention, num_tokens) for attention in attentions)
    if parallel.num_stages > 1:  # on their way to the next stages, and as received
        num_rows_sent = 1 + (NUM_FEATURES if "eagle" in config.speculation.loaded else 0)
        features += (parallel.num_stages + 1) * num_rows_sent * max(most_tokens, graphs.num_tokens) * spec.hidden_size
    if config.model.deterministic and parallel.size > 2:  # what each rank has of a sum, and the sum so far
        features += (parallel.size + 1) * num_tokens * spec.hidden_size
    others = _sums_bytes(spec, config, hardware, graphs.num_tokens)
    most_tokens = max(most_tokens, graphs.num_tokens)
    # drafters may multiply by the head for each head and row; graphs pad rows
    most_logits = most_tokens if config.speculation.loaded else 1 << (max(num_rows, MAX_PROMPT_ROWS) - 1).bit_length()
    others += _written_out_bytes(spec, config, hardware, most_tokens, most_logits)
    max_model_len = config.model.max_model_len or spec.max_model_len
    others += table_bytes(attentions, max_model_len)
    sampled = 0 if parallel.stage else logits + history_bytes(num_seqs, max_model_len, num_rows)
    return sampled + features * hardware.dtype.itemsize + graphs.held_bytes + others


def _latent_features(attention: AttentionSpec, num_tokens: int) -> int:
    """What latent attention keeps at once: a step's tokens, absorbed or with keys and values of each head, and a piece
    of the tokens before them."""
    latent = attention.latent
    if latent is None:
        return 0
    row, made = latent.rank + latent.rope_dim, latent.nope_dim + latent.value_dim
    absorbed = row + latent.rank
    unabsorbed = made + 2 * latent.value_dim
    of_heads = attention.num_q_heads * (attention.head_dim + max(absorbed, unabsorbed))
    return num_tokens * (of_heads + row) + PREFIX_TOKENS * (attention.num_q_heads * made + row)


def _sums_bytes(spec: DecoderSpec, config: EngineConfig, hardware: Hardware, num_graph_tokens: int) -> int:
    """Parts of sums that wait to be added: of the layer that needs most; layers follow each other. num_graph_tokens: of
    the largest CUDA graph; graphs have theirs in a pool of their own."""
    device = hardware.device
    if device.type != "cuda":
        return 0
    num_sms = ops.count_sms(device) if torch.cuda.is_available() else MOST_SMS
    own = spec.of_stage(hardware.parallel)
    attentions = own.of_rank(hardware.parallel).attentions
    if not config.model.deterministic:
        of_products = choose_methods(config.model, spec).linears.split_sums_bytes(num_sms)
        of_attentions = [
            ops.split_sums_bytes(num_sms, attention.head_dim, is_latent=attention.latent is not None)
            for attention in attentions
        ]
        return max(of_products, *of_attentions) + (of_products if num_graph_tokens else 0)
    heads = () if hardware.parallel.stage else (spec.lm_head,)
    linears = {linear.of_rank(hardware.parallel) for linear in (*own.layer_linears, *heads) if not linear.num_experts}
    max_seq_len, total = config.model.max_model_len or spec.max_model_len, 0
    for num_tokens in (config.scheduler.max_num_batched_tokens, num_graph_tokens):
        of_layers = [
            _invariant_attention_bytes(attention, num_tokens, max_seq_len, hardware.dtype, num_sms)
            for attention in attentions
        ]
        of_layers += [
            ops.invariant_mm_bytes(num_tokens, linear.out_features, linear.in_features, hardware.dtype, num_sms)
            for linear in linears
        ]
        total += max(of_layers)
    return total


def _invariant_attention_bytes(
    attention: AttentionSpec, num_tokens: int, max_seq_len: int, dtype: torch.dtype, num_sms: int
) -> int:
    if attention.latent is not None:
        rank = attention.latent.rank
        return ops.invariant_latent_bytes(num_tokens, attention.num_q_heads, rank, dtype, max_seq_len, num_sms)
    sizes = attention.num_q_heads, attention.num_kv_heads, attention.head_dim
    return ops.invariant_attention_bytes(num_tokens, *sizes, max_seq_len, num_sms)


def _activation_width(mlp: DenseSpec | ExpertsSpec, parallel: Parallel) -> int:
    """Features of one token that live at once in a layer of a rank."""
    rows = 1 if isinstance(mlp, DenseSpec) else mlp.routing.num_experts_per_token  # of a token in the MLP
    width = mlp.down.of_rank(parallel).in_features * rows  # whole where ranks split experts: all rows may be one rank's
    if isinstance(mlp, ExpertsSpec) and mlp.shared is not None:
        width += mlp.shared.down.of_rank(parallel).in_features
    return (HIDDEN_COPIES + rows - 1) * mlp.hidden_size + INTERMEDIATE_COPIES * width


def _written_out_bytes(
    spec: DecoderSpec, config: EngineConfig, hardware: Hardware, num_tokens: int, num_logits: int
) -> int:
    """The largest layer of those that products of so many tokens on a GPU write out first. num_logits: rows of the
    head's products."""
    if hardware.device.type != "cuda":
        return 0
    methods, parallel = choose_methods(config.model, spec), hardware.parallel
    held = {(linear, layer.mlp) for layer in spec.of_stage(parallel).layers for linear in layer.linears}
    num_bytes = [
        _written_out_by(methods.experts if linear.num_experts else methods.linears, linear, mlp, num_tokens, hardware)
        for linear, mlp in held
    ]
    num_bytes += [] if parallel.stage else [_written_out_by(methods.head, spec.lm_head, None, num_logits, hardware)]
    return max(num_bytes)


def _written_out_by(
    method: QuantMethod, linear: LinearSpec, mlp: DenseSpec | ExpertsSpec | None, num_tokens: int, hardware: Hardware
) -> int:
    """mlp: the experts that the linear is of, if it is of any."""
    own, num_rows = linear.of_rank(hardware.parallel), num_tokens
    if linear.num_experts and isinstance(mlp, ExpertsSpec):  # of a rank's own, as many on average
        num_rows = -(-num_tokens * mlp.routing.num_experts_per_token * own.num_experts // linear.num_experts)
    return method.written_out_bytes(own, num_rows, hardware.device, hardware.dtype)
