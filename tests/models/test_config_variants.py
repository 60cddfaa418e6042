"""Fields of config.json in other ways than the published checkpoints set them: Hugging Face's logits with each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from paged_forward import PagedForward
from safetensors.torch import load_file, save_file
from slipstream.core.config import ModelConfig
from slipstream.nn.load import load_model
from tiny_checkpoints import TinyCheckpoint, draw, make_checkpoint, relative_error
from tiny_variants import SIZES, VARIANTS
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2MLP
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP

FILE = "model.safetensors"
PROMPT = [(7 * position) % 89 + 3 for position in range(23)]
MLPS = {"deepseek-v2": DeepseekV2MLP, "deepseek-v3": DeepseekV3MLP}


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def error_of(checkpoint: TinyCheckpoint) -> float:
    decoder = load_model(ModelConfig(model=str(checkpoint.path), device="cpu"))
    (ours,) = PagedForward(decoder, [PROMPT]).run([9])
    return relative_error(ours, checkpoint.logits(PROMPT))


@pytest.mark.parametrize(
    "variant", ["deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm4-moe", "glm4-moe-lite", "solar-open"]
)
def test_null_shared_experts_are_none(variant: str, tmp_path: Path) -> None:
    """Hugging Face's classes take no null here; their shared experts add zero instead."""
    checkpoint = make_checkpoint(variant, tmp_path)
    with torch.no_grad():
        for name, parameter in checkpoint.model.named_parameters():
            if "shared_experts.down_proj" in name:
                parameter.zero_()
    tensors = load_file(tmp_path / FILE)
    save_file({name: tensor for name, tensor in tensors.items() if "shared_experts" not in name}, tmp_path / FILE)
    edit_config(tmp_path, n_shared_experts=None)
    assert error_of(checkpoint) < 1e-4


@pytest.mark.parametrize("variant", MLPS)
def test_experts_in_every_other_layer(variant: str, tmp_path: Path) -> None:
    """moe_layer_freq as the published code reads it: layer 1 of 0 to 2 is dense."""
    checkpoint = make_checkpoint(variant, tmp_path, first_k_dense_replace=0)
    model = checkpoint.model
    model.model.layers[1].mlp = MLPS[variant](model.config)
    draw(model).save_pretrained(tmp_path)
    edit_config(tmp_path, moe_layer_freq=2)
    assert error_of(checkpoint) < 1e-4


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_the_activation_of_a_hybrid_s_only_mlp(activation: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("granite-hybrid", tmp_path, hidden_act=activation)
    assert error_of(checkpoint) < 1e-4


def test_a_hybrid_without_positions(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("granite-hybrid", tmp_path, position_embedding_type="nope")
    assert error_of(checkpoint) < 1e-4


def test_the_rotated_part_of_minimax_is_its_factor_where_that_is_stated(tmp_path: Path) -> None:
    """transformers 4's spelling, in which rotary_dim says another part: Hugging Face's class passes over it."""
    config = MiniMaxM2Config(**{**SIZES, **VARIANTS["minimax-m2"][1], "rotary_dim": 8}, partial_rotary_factor=0.25)
    config.architectures = ["MiniMaxM2ForCausalLM"]
    model = draw(MiniMaxM2ForCausalLM(config).eval())
    model.save_pretrained(tmp_path)
    edit_config(tmp_path, rope_parameters=None, rope_theta=5e6, partial_rotary_factor=0.25, rotary_dim=8)
    assert error_of(TinyCheckpoint(tmp_path, model)) < 1e-4
