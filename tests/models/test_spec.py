"""DecoderSpec's arithmetic against Hugging Face's own counts, and what read_spec takes from the config files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from slipstream.core.errors import ConfigError
from slipstream.nn.read_spec import read_spec
from slipstream.nn.spec import DecoderSpec
from tiny_checkpoints import make_checkpoint, selection_biases
from tiny_variants import VARIANTS

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008],
    "tie_word_embeddings": False,
}


def spec_of(folder: Path, config: dict[str, object], generation: dict[str, object] | None = None) -> DecoderSpec:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_spec(folder)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_num_parameters_is_hugging_face_s_count(variant: str, tmp_path: Path) -> None:
    model = make_checkpoint(variant, tmp_path).model
    ranking = sum(bias.numel() for _, bias in selection_biases(model))  # buffers of Hugging Face's models
    assert read_spec(tmp_path).num_parameters == model.num_parameters() + ranking


def test_llama_3_8b(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LLAMA_3_8B, {"eos_token_id": [128001, 128009]})
    assert spec.num_parameters == 8_030_261_248  # the published count
    assert spec.weight_bytes(torch.bfloat16) == 16_060_522_496
    assert spec.kv_bytes_per_token(torch.bfloat16) == 2 * 32 * 8 * 128 * 2
    assert spec.kv_bytes_per_token(torch.float8_e4m3fn) == 65536
    assert (spec.layers[0].attention.head_dim, spec.dtype, spec.norm_eps) == (128, torch.bfloat16, 1e-5)
    assert spec.eos_token_ids == (128001, 128009, 128008)
    assert spec.max_model_len == 131072


def test_context_at_which_attention_costs_as_much_as_the_products(tmp_path: Path) -> None:
    """Per token and layer 2 FLOP a weight, and 4 x 32 x 128 for each cached token."""
    weights = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    assert spec_of(tmp_path, LLAMA_3_8B).attention_parity == 2 * weights / (4 * 32 * 128)
    windowed = {**LLAMA_3_8B, "architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    assert spec_of(tmp_path, windowed).attention_parity == float("inf")


def test_eos_may_be_one_id_a_list_or_absent(tmp_path: Path) -> None:
    assert spec_of(tmp_path, {**LLAMA_3_8B, "eos_token_id": 7}).eos_token_ids == (7,)
    assert spec_of(tmp_path, {**LLAMA_3_8B, "eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize("wrong", ["</s>", [7, [8]], 7.0])
def test_an_end_that_is_no_id_is_named_with_its_file(wrong: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^generation_config\.json eos_token_id=.*: must be a token id or a list"):
        spec_of(tmp_path, LLAMA_3_8B, {"eos_token_id": wrong})
    with pytest.raises(ConfigError, match=r"^config\.json eos_token_id=.*: must be a token id or a list"):
        spec_of(tmp_path, {**LLAMA_3_8B, "eos_token_id": wrong}, {"eos_token_id": 7})


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 4096),
        ({"type": "linear", "factor": 2.5}, 10240),
        ({"type": "dynamic", "factor": 4.0}, 16384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
    ],
)
def test_longest_sequence_follows_the_rope_scaling(
    tmp_path: Path, scaling: dict[str, object] | None, length: int
) -> None:
    config = {**LLAMA_3_8B, "max_position_embeddings": 4096, "rope_scaling": scaling}
    assert spec_of(tmp_path, config).max_model_len == length


def test_qwen2_windows_start_at_max_window_layers(tmp_path: Path) -> None:
    config = {**LLAMA_3_8B, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 100, "max_window_layers": 30}
    assert set(windows_of(spec_of(tmp_path, config))) == {None}  # off unless use_sliding_window
    windows = windows_of(spec_of(tmp_path, {**config, "use_sliding_window": True}))
    assert windows == [None] * 30 + [100, 100]


def windows_of(spec: DecoderSpec) -> list[int | None]:
    return [layer.attention.sliding_window for layer in spec.layers]
