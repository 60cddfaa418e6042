"""config.json as models were published with it: every family reads its own, to the published number of parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published_configs import LLAMA3, PUBLISHED, YARN, config
from slipstream.core.errors import ConfigError
from slipstream.nn.read_spec import read_spec


@pytest.mark.parametrize("name", PUBLISHED)
def test_reads_what_was_published(name: str, tmp_path: Path) -> None:
    values, num_parameters = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_spec(tmp_path).num_parameters == num_parameters


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Mixtral-8x7B-v0.1", {"rms_norm_eps": 1e-5, "rope_theta": 1e6}),
        ("Mistral-Small-24B-Instruct-2501", {"sliding_window": 4096}),
        ("DeepSeek-R1-Distill-Qwen-1.5B", {"sliding_window": 4096}),
        ("Qwen1.5-MoE-A2.7B", {"sliding_window": 4096}),
        ("Qwen3-30B-A3B", {"sliding_window": 4096}),
        ("gpt-oss-20b", {"rms_norm_eps": 1e-5, "rope_theta": 150_000, "sliding_window": 128}),
        ("gpt-oss-20b", {"rope_scaling": YARN}),
        ("GLM-4.5-Air", {"rms_norm_eps": 1e-5}),
        ("GLM-4.7-Flash", {"rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8}),
        ("gemma-2-9b", {"sliding_window": 4096}),
        ("gemma-3-1b-it", {"sliding_window": 4096, "rope_theta": 1e6, "rope_local_base_freq": 10_000}),
        ("Phi-4-mini-instruct", {"original_max_position_embeddings": 4096}),
        ("Olmo-3-1025-7B", {"sliding_window": 4096, "rope_theta": 500_000}),
        ("MiniMax-M2", {"rope_theta": 5e6}),
        ("OLMoE-1B-7B-0924", {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8}),
        ("OLMoE-1B-7B-0924", {"norm_topk_prob": False}),
        ("ERNIE-4.5-0.3B-PT", {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}),
        ("ERNIE-4.5-0.3B-PT", {"tie_word_embeddings": True, "use_bias": False}),
        ("ERNIE-4.5-21B-A3B-PT", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}),
        ("ERNIE-4.5-21B-A3B-PT", {"moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2}),
        ("ERNIE-4.5-21B-A3B-PT", {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1}),
        ("dots.llm1.inst", {"n_group": 1, "topk_group": 1, "max_window_layers": 62, "attention_bias": False}),
        ("EXAONE-4.0-32B", {"sliding_window": 4096, "rms_norm_eps": 1e-5}),
        (
            "EXAONE-4.0-32B",
            {"sliding_window_pattern": 4, "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16},
        ),
        ("Hunyuan-A13B-Instruct", {"rms_norm_eps": 1e-5, "moe_intermediate_size": [3072] * 32}),
        ("internlm3-8b-instruct", {"head_dim": 128, "bias": False, "qkv_bias": False, "rms_norm_eps": 1e-5}),
        ("HyperCLOVAX-SEED-Think-14B", {"use_post_norm": True, "residual_multiplier": 1.0, "head_dim": 128}),
        ("cwm", {"layer_types": ["full_attention", *["sliding_attention"] * 3] * 16, "sliding_window": 8192}),
        ("cwm", {"rope_scaling": {**LLAMA3, "factor": 16.0}, "rope_theta": 1e6, "head_dim": 128, "rms_norm_eps": 1e-5}),
        ("Solar-Open-100B", {"head_dim": 128, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "intermediate_size": 10240}),
        ("Seed-OSS-36B-Instruct", {"head_dim": 128, "attention_bias": True}),
        ("GLM-4-9B-0414", {"rms_norm_eps": 1.5625e-7}),
        ("chatglm3-6b", {"layernorm_epsilon": 1e-5}),
        ("SmolLM3-3B", {"rope_theta": 2e6}),
        ("SmolLM3-3B", {"no_rope_layers": [1, 1, 1, 0] * 9, "layer_types": ["full_attention"] * 36}),
    ],
)
def test_what_a_config_leaves_out_is_what_hugging_face_takes(
    name: str, fields: dict[str, object], tmp_path: Path
) -> None:
    """fields: the defaults of transformers' class. Qwen's windows are switched on, which needs their size."""
    stated = {**PUBLISHED[name][0], **fields}
    if "use_sliding_window" in stated:
        stated |= {"use_sliding_window": True, "max_window_layers": 8}
    specs = []
    for values in (stated, {key: value for key, value in stated.items() if key not in fields}):
        (tmp_path / "config.json").write_text(json.dumps(values))
        specs.append(read_spec(tmp_path))
    assert specs[0] == specs[1]


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("Baichuan2-7B-Chat", {"max_position_embeddings": None}, "hidden_size=4096: is that of a model with rotations"),
        ("DeepSeek-V2-Lite", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'.*group_limited_greedy"),
        ("DeepSeek-V2-Lite", {"norm_topk_prob": True}, "norm_topk_prob=True: must be false"),
        ("DeepSeek-V2-Lite", {"attention_bias": True}, "attention_bias=True: must be false"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("DeepSeek-V3", {"moe_layer_freq": 0}, "moe_layer_freq=0: must be an integer of at least 1"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["dense"]}, "mlp_layer_types=.*must be 47 of"),
        ("Baichuan2-13B-Chat", {"max_position_embeddings": 4096}, "hidden_size=5120: is that of a model with ALiBi"),
        ("chatglm3-6b", {"rmsnorm": False}, "rmsnorm=False: must be true"),
        ("chatglm3-6b", {"ffn_hidden_size": None}, "ffn_hidden_size=None: is missing"),
        ("chatglm3-6b", {"padded_vocab_size": "many"}, "padded_vocab_size='many'"),
        ("gemma-2-9b", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True: must be false"),
        ("gemma-2-9b", {"hidden_activation": "relu"}, "hidden_activation='relu'"),
        ("gemma-3-1b-it", {"layer_types": ["full_attention"]}, "layer_types=.*must be 26 of"),
        ("gemma-3-1b-it", {"sliding_window": None}, "sliding_window=None: is missing"),
        ("gemma-3-1b-it", {"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config=None: is missing"),
        ("GLM-4.5-Air", {"n_group": 3}, "n_group=3: must divide n_routed_experts=128"),
        ("GLM-4.5-Air", {"num_experts_per_tok": 129}, "num_experts_per_tok=129"),
        ("GLM-4.5-Air", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_pytorch_tanh'"),
        ("GLM-4-9B-0414", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5: must leave an even part"),
        ("MiniMax-M2", {"attn_type_list": [0, 1] * 31}, "attn_type_list=.*linear attention"),
        ("OLMoE-1B-7B-0924", {"clip_qkv": 8.0}, "clip_qkv=8.0: must be null"),
        ("granite-4.0-micro", {"layer_types": ["mamba", "attention"] * 20}, "layer_types=.*must be 40 of attention or"),
        ("granite-4.0-micro", {"layer_types": None}, "layer_types=None: must be 40 of attention or"),
        ("granite-4.0-micro", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
        ("granite-4.0-micro", {"shared_intermediate_size": 0}, "shared_intermediate_size=0: must be at least 1"),
        ("granite-3.1-1b-a400m-instruct", {"logits_scaling": 0}, "logits_scaling=0: must be a number above 0"),
        ("ERNIE-4.5-21B-A3B-PT", {"use_bias": True}, "use_bias=True: must be false in models with experts"),
        ("ERNIE-4.5-21B-A3B-PT", {"moe_norm_min": 0.1}, "moe_norm_min=0.1: must be at most 1e-06"),
        ("ERNIE-4.5-21B-A3B-PT", {"moe_k": 65}, "moe_k=65: must be at most moe_num_experts=64"),
        ("ERNIE-4.5-21B-A3B-PT", {"moe_layer_end_index": -2}, "moe_layer_end_index=-2"),
        ("dots.llm1.inst", {"scoring_func": "softmax"}, "scoring_func='softmax'.*noaux_tc"),
        ("dots.llm1.inst", {"n_shared_experts": None}, "n_shared_experts=None: is missing"),
        ("EXAONE-4.0-32B", {"layer_types": None}, "sliding_window_pattern='LLLG': must be an integer"),
        ("EXAONE-4.0-32B", {"layer_types": ["full_attention"]}, "layer_types=.*must be 64 of"),
        ("Hunyuan-A13B-Instruct", {"moe_topk": [8] * 31 + [4]}, "moe_topk=.*must be the same in all layers"),
        ("Hunyuan-A13B-Instruct", {"moe_intermediate_size": 1536}, "moe_intermediate_size=1536: must be .*=3072"),
        ("Hunyuan-A13B-Instruct", {"num_shared_expert": [2] * 32}, "num_shared_expert=2: must be 1"),
        ("Hunyuan-A13B-Instruct", {"rope_scaling": {"type": "dynamic"}}, "rope_scaling factor=None: is missing"),
        ("Hunyuan-A13B-Instruct", {"num_experts": "64"}, "num_experts='64': must be an integer"),
        ("internlm3-8b-instruct", {"bias": "all"}, "bias='all': must be true or false"),
        ("HyperCLOVAX-SEED-Think-14B", {"attention_multiplier": 0}, "attention_multiplier=0: must be a number above 0"),
        ("cwm", {"attention_bias": True}, "attention_bias=True: must be false"),
        ("Solar-Open-100B", {"use_qk_norm": True}, "use_qk_norm=True: must be false"),
        ("Solar-Open-100B", {"first_k_dense_replace": 1}, "first_k_dense_replace=1: must be 0"),
        ("Seed-OSS-36B-Instruct", {"attention_out_bias": "no"}, "attention_out_bias='no': must be true or false"),
        ("gemma-7b", {"hidden_act": "silu"}, "hidden_act='silu'.*gelu_pytorch_tanh"),
        ("SmolLM3-3B", {"no_rope_layers": [1, 0]}, "no_rope_layers=.*must be 36 of 0 or 1"),
        ("MiniMax-M2", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("phi-4", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling=.*rope type linear is none"),
        ("Phi-4-mini-instruct", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor=.*48"),
        ("gpt-oss-20b", {"quantization_config": {"quant_method": "int7"}}, "quant_method='int7'"),
        (
            "Qwen3-30B-A3B",
            {"dual_chunk_attention_config": {"chunk_size": 1024}},
            "local_size=.*below chunk_size",
        ),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [-1]}, "mlp_only_layers=.*integers of at least 0"),
    ],
)
def test_what_cannot_be_honoured_is_named(name: str, changes: dict[str, object], named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED[name][0], **changes}))
    with pytest.raises(ConfigError, match=named):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("chunks", "length"),
    [
        ({"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}, 253952),
        ({"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 131072}, 131072),
        ({"local_size": 192}, 8000),
        (None, 1010000),
    ],
)
def test_dual_chunks_are_served_up_to_the_first(
    chunks: dict[str, int] | None, length: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Qwen2.5-7B-Instruct-1M: positions of later chunks, and scores by length, are none that rotations have here."""
    values = {**PUBLISHED["DeepSeek-R1-Distill-Qwen-1.5B"][0], "max_position_embeddings": 1010000, "rope_theta": 1e7}
    (tmp_path / "config.json").write_text(json.dumps({**values, "dual_chunk_attention_config": chunks}))
    assert read_spec(tmp_path).max_model_len == length
    assert (f"up to {length} tokens are served" in caplog.text) is (chunks is not None)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_ministral_3_has_a_window_only_where_it_is_stated(is_wrapped: bool, tmp_path: Path) -> None:
    """Its text_config may leave out what is null; Mistral's default is a window of 4096."""
    rope = {**YARN, "factor": 16.0, "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}
    rope["original_max_position_embeddings"] = 16384
    values = config("Ministral3ForCausalLM", 4096, 14336, 34, 32, 8, 131072, 262144, rope_parameters=rope)
    if is_wrapped:
        text = {**values, "model_type": "ministral3", "architectures": None}
        values = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(values))
    spec = read_spec(tmp_path)
    attention = spec.layers[0].attention
    assert (attention.sliding_window, attention.head_dim, spec.norm_eps, spec.max_model_len) == (
        None,
        128,
        1e-5,
        262144,
    )
