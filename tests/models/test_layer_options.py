"""What a layer's spec may say and no served family says yet, against Hugging Face's models that do.

Each case is a family as a new one would be written: a reader of its config and a name map, nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from paged_forward import PagedForward
from safetensors.torch import load_file, save_file
from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.attention.invariant import InvariantAttention
from slipstream.nn.attention.split_kv import SplitKVAttention
from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import AttentionSpec, DenseSpec, ExpertsSpec, LatentSpec, LayerSpec, RouterSpec
from slipstream.nn.load import load_model
from slipstream.nn.models.common import base_spec
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.rope_spec import RopeSpec
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.spec_refusals import check_served
from slipstream_kernels.ops import RoutingRule
from tiny_checkpoints import TinyCheckpoint, draw, relative_error
from tiny_variants import SIZES
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

Tensors = dict[str, torch.Tensor]
TOLERANCE = 1e-4
PROMPTS = [[(7 * i + 3 * j) % 89 + 3 for j in range(length)] for i, length in enumerate((37, 11, 1, 20))]
LAYERS = "model.layers.{layer}"
SLOPES = (*(2.0 ** (-2 * i) for i in range(1, 5)), 2.0**-1, 2.0**-3)  # of six heads


@dataclass(frozen=True)
class Case:
    """names: what differs from Llama's. stored: what a checkpoint of this layout holds of Hugging Face's tensors."""

    model: Callable[[], PreTrainedModel]
    read_spec: Callable[[HFConfig], DecoderSpec]
    names: Mapping[str, str]
    stored: Callable[[Tensors], Tensors] = lambda tensors: tensors


def each_layer(change: Callable[[int, LayerSpec], LayerSpec]) -> Callable[[HFConfig], DecoderSpec]:
    return lambda config: base_spec(config).map_layers(change)


def with_attention(layer: LayerSpec, **fields: object) -> LayerSpec:
    return replace(layer, attention=replace(layer.attention, **fields))


def olmo2(_: int, layer: LayerSpec) -> LayerSpec:
    return replace(with_attention(layer, qk_norm="flat"), norms="post")


def gemma2(index: int, layer: LayerSpec) -> LayerSpec:
    layer = with_attention(layer, scale=5.0**-0.5, soft_cap=3.0, sliding_window=9 if index % 2 == 0 else None)
    assert isinstance(layer.mlp, DenseSpec)
    return replace(layer, mlp=replace(layer.mlp, activation="gelu_tanh"), norms="both")


def gemma2_stored(tensors: Tensors) -> Tensors:
    """Norms hold w of 1 + w, and the embedding is multiplied by the root of its size when it is read."""
    stored = {name: tensor + 1 if "norm" in name else tensor for name, tensor in tensors.items()}
    stored["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] * math.sqrt(SIZES["hidden_size"])
    return stored


def glm(_: int, layer: LayerSpec) -> LayerSpec:
    assert layer.attention.rope is not None
    rope = replace(layer.attention.rope, rotary_dim=4, is_interleaved=True)
    return with_attention(layer, rope=rope, qkv_bias=True)


def glm_stored(tensors: Tensors) -> Tensors:
    for name in [name for name in tensors if "gate_up_proj" in name]:
        gate, up = tensors.pop(name).chunk(2)
        tensors |= {name.replace("gate_up", "gate"): gate.clone(), name.replace("gate_up", "up"): up.clone()}
    return tensors


def smollm3(index: int, layer: LayerSpec) -> LayerSpec:
    return with_attention(layer, rope=None) if index == 1 else layer


def alibi(_: int, layer: LayerSpec) -> LayerSpec:
    return with_attention(layer, rope=None, alibi_slopes=SLOPES)


class AlibiModel(LlamaForCausalLM):
    """Baichuan's way: rotations by no angle, and the bias as a mask."""

    def forward(self, input_ids: torch.Tensor) -> object:
        distance = torch.arange(input_ids.shape[1])[None] - torch.arange(input_ids.shape[1])[:, None]
        bias = torch.tensor(SLOPES).view(1, -1, 1, 1) * distance
        return super().forward(input_ids, attention_mask=bias.masked_fill(distance > 0, torch.finfo().min))


def make_alibi() -> PreTrainedModel:
    model = AlibiModel(LlamaConfig(**SIZES))
    model.model.rotary_emb.inv_freq.zero_()
    return model


def qwen2_moe(index: int, layer: LayerSpec) -> LayerSpec:
    layer = with_attention(layer, qkv_bias=True)
    if index == 1:
        return layer
    shared = DenseSpec(48, 40, prefix="shared_")
    experts = ExpertsSpec(48, 24, 5, RouterSpec(2, RoutingRule(renormalises=False)), shared, shared_gate=True)
    return replace(layer, mlp=experts)


MOE = f"{LAYERS}.mlp"
SANDWICH = {
    "attention_output_norm": f"{LAYERS}.post_attention_layernorm",
    "post_attention_norm": f"{LAYERS}.pre_feedforward_layernorm",
    "mlp_output_norm": f"{LAYERS}.post_feedforward_layernorm",
}
MOE_SIZES = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "num_experts": 5}
UNCAPPED = {"final_logit_softcapping": None, "tie_word_embeddings": False}
CASES = {
    "post-norms, flat q/k norms": Case(lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES)), each_layer(olmo2), SANDWICH),
    "soft caps, sandwich norms, gelu": Case(
        lambda: Gemma2ForCausalLM(
            Gemma2Config(**SIZES, **UNCAPPED, head_dim=8, query_pre_attn_scalar=5, attn_logit_softcapping=3.0,
                         sliding_window=9)
        ),
        each_layer(gemma2),
        SANDWICH,
        gemma2_stored,
    ),
    "neighbouring pairs, partly rotated": Case(
        lambda: GlmForCausalLM(GlmConfig(**SIZES, head_dim=8, partial_rotary_factor=0.5, attention_bias=True,
                                         pad_token_id=0)),
        each_layer(glm),
        {},
        glm_stored,
    ),
    "a layer without rotation": Case(
        lambda: SmolLM3ForCausalLM(SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1], pad_token_id=0,
                                                 tie_word_embeddings=False)),
        each_layer(smollm3),
        {},
    ),
    "ALiBi": Case(make_alibi, each_layer(alibi), {}),
    "shared experts beside a dense layer": Case(
        lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **MOE_SIZES, num_experts_per_tok=2, mlp_only_layers=[1],
                                                   norm_topk_prob=False)),
        each_layer(qwen2_moe),
        {
            "router": f"{MOE}.gate",
            **{f"expert_{part}": f"{MOE}.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")},
            **{f"shared_{part}": f"{MOE}.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
            "shared_expert_gate": f"{MOE}.shared_expert_gate",
        },
    ),
}  # fmt: skip


@pytest.fixture(params=list(CASES))
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TinyCheckpoint]:
    with written(CASES[request.param], tmp_path) as made:
        yield made


@contextmanager
def written(case: Case, tmp_path: Path) -> Iterator[TinyCheckpoint]:
    torch.manual_seed(3)
    model = draw(case.model().eval())
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: t.contiguous() for name, t in case.stored(load_file(file)).items()}, file)
    architecture = "TestFamily"
    model.config.architectures = [architecture]
    model.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"].pop("partial_rotary_factor", None)  # the readers above say it
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "silu"}))
    FAMILIES.register(architecture)(Family(case.read_spec, {**LLAMA_NAMES, **case.names}))
    try:
        yield TinyCheckpoint(tmp_path, model)
    finally:
        del FAMILIES._entries[architecture]


@pytest.mark.parametrize("splits", [False, True], ids=["paged", "split"])
def test_logits(checkpoint: TinyCheckpoint, splits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In mixed batches, by both backends, and of last rows alone."""
    decoder = load_model(ModelConfig(model=str(checkpoint.path), device="cpu"))
    if splits:
        monkeypatch.setattr(decoder, "backend", SplitKVAttention(decoder.spec))
        monkeypatch.setattr("slipstream.worker.input_batch.MAX_DECODE_QUERY_LEN", 4)
    right = [checkpoint.logits(prompt) for prompt in PROMPTS]
    for ours, reference in zip(PagedForward(decoder, PROMPTS, block_size=8).run([13, 1, 4]), right):
        assert relative_error(ours, reference) <= TOLERANCE
    forward = PagedForward(decoder, PROMPTS, block_size=8)
    forward.step({0: 20, 1: 10})
    for row, request in zip(forward.step_last({1: 1, 0: 17, 3: 20}, (1, 0, 3)), (1, 0, 3), strict=True):
        assert relative_error(row, right[request][-1]) <= TOLERANCE
    assert decoder.spec.num_parameters == checkpoint.model.num_parameters()


LLAMA_LAYER = LayerSpec(AttentionSpec(48, 48, 6, 2, 8, None), DenseSpec(48, 72))
LATENT = LatentSpec(40, 24, 8, 20)
EXPERTS = ExpertsSpec(48, 24, 5, RouterSpec(2))


def routed(rule: RoutingRule) -> LayerSpec:
    return replace(LLAMA_LAYER, mlp=replace(EXPERTS, routing=RouterSpec(2, rule)))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (with_attention(LLAMA_LAYER, latent=LATENT, sliding_window=9), "windows, caps, .* of latent attention"),
        (with_attention(LLAMA_LAYER, latent=LATENT), "shared key features are not all rotated"),
        (with_attention(LLAMA_LAYER, qk_norm="row"), "q/k norm 'row' is not served"),
        (with_attention(LLAMA_LAYER, output_gate=True), "gated attention outputs are not served"),
        (with_attention(LLAMA_LAYER, alibi_slopes=(1.0,)), "1 ALiBi slopes for 6 query heads"),
        (replace(LLAMA_LAYER, norms="none"), "norms 'none' is not served"),
        (replace(LLAMA_LAYER, mlp=DenseSpec(48, 72, "relu")), "MLP activation 'relu' is not served"),
        (routed(RoutingRule("tanh")), "router: score 'tanh'"),
        (routed(RoutingRule(num_groups=2)), "router: 5 experts are not 2 groups of equal size"),
        (routed(RoutingRule(num_groups=5)), "router: 2 experts of 1 of 5 groups of 1"),
        (routed(RoutingRule(num_groups=5, topk_groups=2, group_score="top2sum")), "groups of one expert have no two"),
        (replace(LLAMA_LAYER, mlp=replace(EXPERTS, shared_gate=True)), "a gate of shared experts without"),
    ],
)
def test_what_no_code_reads_is_refused(layer: LayerSpec, reason: str) -> None:
    check_served(DecoderSpec("Test", 97, 48, (LLAMA_LAYER,), 64, 1e-6))
    with pytest.raises(ConfigError, match=f"model='Test': layer 1: .*{reason}"):
        check_served(DecoderSpec("Test", 97, 48, (LLAMA_LAYER, layer), 64, 1e-6))


@pytest.mark.parametrize("name", ["soft caps, sandwich norms, gelu", "ALiBi"])
def test_deterministic_mode_knows_what_its_attention_is_told(name: str, tmp_path: Path) -> None:
    with written(CASES[name], tmp_path) as checkpoint:
        decoder = load_model(ModelConfig(model=str(checkpoint.path), device="cpu", deterministic=True))
        assert isinstance(decoder.backend, InvariantAttention)
        for ours, prompt in zip(PagedForward(decoder, PROMPTS, block_size=8).run([13, 1, 4]), PROMPTS):
            assert relative_error(ours, checkpoint.logits(prompt)) <= TOLERANCE


ROPE = RopeSpec("default", 500.0, 8)
