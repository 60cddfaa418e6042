"""Variants of the served families as tiny configs of Hugging Face's classes; tiny_checkpoints.py writes them."""

from __future__ import annotations

import pytest
import transformers as hf
from stored_layouts import AlibiModel

VOCAB_SIZE = 97
MAX_POSITIONS = 64
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "attn_implementation": "eager",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CLASSES = {  # of the config and the model, by their names in transformers, whose older versions lack some
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "qwen2-moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "baichuan": ("LlamaConfig", "LlamaForCausalLM"),
    "baichuan-alibi": ("LlamaConfig", "AlibiModel"),
    "chatglm": ("GlmConfig", "GlmForCausalLM"),
    "deepseek-v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "deepseek-v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "dots1": ("Dots1Config", "Dots1ForCausalLM"),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM"),
    "ernie4_5-moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM"),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM"),
    "exaone-moe": ("ExaoneMoeConfig", "ExaoneMoeForCausalLM"),
    "gemma": ("GemmaConfig", "GemmaForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma3-seeing": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "kimi-seeing": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "mistral-seeing": ("MistralConfig", "MistralForCausalLM"),
    "glm": ("GlmConfig", "GlmForCausalLM"),
    "glm4": ("Glm4Config", "Glm4ForCausalLM"),
    "glm4-moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "glm4-moe-lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM"),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
    "granite-moe": ("GraniteMoeConfig", "GraniteMoeForCausalLM"),
    "granite-moe-shared": ("GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM"),
    "granite-hybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
    "hunyuan": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": ("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM"),
    "hyperclovax": ("HyperCLOVAXConfig", "HyperCLOVAXForCausalLM"),
    "cwm": ("CwmConfig", "CwmForCausalLM"),
    "internlm3": ("InternLM3Config", "LlamaForCausalLM"),
    "mimo": ("Qwen2Config", "Qwen2ForCausalLM"),
    "minimax-m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM"),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "seed-oss": ("SeedOssConfig", "SeedOssForCausalLM"),
    "solar-open": ("SolarOpenConfig", "SolarOpenForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
}


def classes_of(family: str) -> tuple[type[hf.PreTrainedConfig], type[hf.PreTrainedModel]]:
    """The classes of the config and the model. Skips the test where the installed transformers has none."""
    config, model = CLASSES[family]
    if missing := [name for name in (config, model) if name != "AlibiModel" and not hasattr(hf, name)]:
        pytest.skip(f"transformers {hf.__version__} has no {missing[0]}")
    return getattr(hf, config), AlibiModel if model == "AlibiModel" else getattr(hf, model)


EXPERTS: dict[str, object] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GLM: dict[str, object] = {"head_dim": 8, "pad_token_id": 0}
GLM_EXPERTS: dict[str, object] = {
    **EXPERTS,
    "head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, object] = {
    **{name: value for name, value in GLM_EXPERTS.items() if name not in ("num_experts", "head_dim")},
    "num_key_value_heads": 6,
    "kv_lora_rank": 40,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "pad_token_id": 0,
}


GRANITE: dict[str, object] = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
LAYER_ROPES: dict[str, object] = {
    "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}


def _rope(rope_type: str, **fields: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 500.0, **fields}}


# name -> (family, what its config changes); thetas and original lengths are small so that scaling acts within 64 tokens
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama2-mha": ("llama", {"num_key_value_heads": 6}),
    "llama3-gqa-rope": (
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama-mqa-head-dim": ("llama", {"num_key_value_heads": 1, "head_dim": 10}),
    "llama-rope-linear": ("llama", _rope("linear", factor=4.0)),
    "llama-rope-dynamic": ("llama", _rope("dynamic", factor=2.0)),
    "llama-rope-yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama-rope-yarn-mscale": (
        "llama",
        _rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=8.0,
            beta_slow=2.0,
            mscale=0.7,
            mscale_all_dim=1.0,
            truncate=False,
        ),
    ),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-windows": (
        "qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "mistral-full": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "ministral3": (
        "ministral3",
        {"head_dim": 12, **_rope("yarn", factor=2.0, original_max_position_embeddings=12, mscale=1.0,
                                 mscale_all_dim=1.0, llama_4_scaling_beta=0.1)},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "qwen2-moe": (
        "qwen2-moe",
        {**EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1], "num_key_value_heads": 2},
    ),
    "qwen2-moe-windows": (
        "qwen2-moe",
        {**EXPERTS, "shared_expert_intermediate_size": 40, "use_sliding_window": True, "sliding_window": 9},
    ),
    "qwen3-moe": ("qwen3-moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "qwen3-moe-window": ("qwen3-moe", {**EXPERTS, "head_dim": 16, "use_sliding_window": True, "sliding_window": 9}),
    "chatglm": ("chatglm", GLM),
    "glm": ("glm", GLM),
    "glm4": ("glm4", {**GLM, "attention_bias": False}),
    "glm4-moe": ("glm4-moe", {**GLM_EXPERTS, "attention_bias": True, "first_k_dense_replace": 1}),
    "glm4-moe-groups": (
        "glm4-moe",
        {**GLM_EXPERTS, "use_qk_norm": True, "n_group": 4, "topk_group": 2, "n_shared_experts": 2},
    ),
    "deepseek-v2": (
        "deepseek-v2", {**LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v2-lite": (
        "deepseek-v2",
        {**LATENT, "q_lora_rank": None, "n_shared_experts": 2,
         **_rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.7)},
    ),
    "deepseek-v3": (
        "deepseek-v3",
        {**LATENT, "n_group": 4, "topk_group": 2, "kv_lora_rank": 128,
         **_rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0)},
    ),
    "deepseek-v3-halves": ("deepseek-v3", {**LATENT, "n_group": 1, "topk_group": 1, "rope_interleave": False}),
    "deepseek-v3-null": (
        "deepseek-v3", {**LATENT, "n_group": 1, "topk_group": 1, "rope_interleave": None, "norm_topk_prob": None},
    ),
    "deepseek-v2-halves": ("deepseek-v2", {**LATENT, "q_lora_rank": None, "rope_interleave": False}),
    "glm4-moe-lite": ("glm4-moe-lite", {**LATENT, "v_head_dim": 36}),
    "baichuan": ("baichuan", {"num_key_value_heads": 6}),
    "baichuan2-head": ("baichuan", {"num_key_value_heads": 6, "vocab_size": 125_696}),
    "baichuan-alibi": ("baichuan-alibi", {"num_key_value_heads": 6}),
    "dots1": ("dots1", {**GLM_EXPERTS, "n_shared_experts": 2, "norm_topk_prob": True, "attention_bias": True}),
    "dots1-groups-windows": (
        "dots1",
        {**GLM_EXPERTS, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0, "sliding_window": 9,
         "max_window_layers": 1},
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 16}),
    "ernie4_5-biases": ("ernie4_5", {"head_dim": 8, "use_bias": True, "tie_word_embeddings": False}),
    "ernie4_5-moe": (
        "ernie4_5-moe", {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2},
    ),
    "ernie4_5-moe-interval": (
        "ernie4_5-moe",
        {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 0,
         "num_hidden_layers": 5, "moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 2,
         "tie_word_embeddings": False},
    ),
    "exaone4": ("exaone4", {"sliding_window": 9, "sliding_window_pattern": 2}),
    "exaone4-full": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "exaone-moe": (
        "exaone-moe",
        {**EXPERTS, "sliding_window": 9, "num_hidden_layers": 5, "num_shared_experts": 2, "num_experts": 8},
    ),
    "exaone-moe-groups": (
        "exaone-moe",
        {**EXPERTS, "sliding_window": 9, "num_experts": 8, "n_group": 4, "topk_group": 2,
         "mlp_layer_types": ["sparse", "dense", "sparse"],
         "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "gemma": ("gemma", {"head_dim": 20, "attention_bias": True}),
    "gemma2": (
        "gemma2",
        {"head_dim": 8, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0,
         "sliding_window": 9},
    ),
    "gemma2-uncapped": (
        "gemma2",
        {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True,
         "tie_word_embeddings": False},
    ),
    "gemma3": (
        "gemma3",
        {"head_dim": 8, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2,
         "num_hidden_layers": 4, "rope_parameters": LAYER_ROPES},
    ),
    "gemma3-seeing": ("gemma3-seeing", {"head_dim": 8, "sliding_window": 9, "layer_types": None}),
    "kimi-seeing": (
        "kimi-seeing",
        {**LATENT, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
         **_rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=1.0, beta_slow=1.0, mscale=1.0,
                 mscale_all_dim=1.0)},
    ),
    "mistral-seeing": ("mistral-seeing", {"sliding_window": None, "head_dim": 16}),
    "gpt-oss": (
        "gpt-oss",
        {"head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": 9,
         "swiglu_limit": 0.7,
         **_rope("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False)},
    ),
    "granite": ("granite", {**GRANITE, "attention_bias": True, "tie_word_embeddings": True}),
    "granite-moe": (
        "granite-moe", {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24},
    ),
    "granite-moe-shared": (
        "granite-moe-shared",
        {**GRANITE, "num_local_experts": 6, "intermediate_size": 24, "shared_intermediate_size": 40,
         "attention_bias": True, "tie_word_embeddings": True},
    ),
    "granite-hybrid": (
        "granite-hybrid",
        {**GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 40,
         "layer_types": ["full_attention"] * 3, "position_embedding_type": "rope", "tie_word_embeddings": True,
         "mamba_n_heads": 32},
    ),
    "granite-hybrid-unrotated": (
        "granite-hybrid",
        {**GRANITE, "num_local_experts": 6, "intermediate_size": 24, "shared_intermediate_size": 40,
         "layer_types": ["full_attention"] * 3, "mamba_n_heads": 32},
    ),
    "hunyuan": ("hunyuan", {"head_dim": 16, "tie_word_embeddings": True}),
    "hunyuan-alpha": ("hunyuan", {"head_dim": 8, **_rope("dynamic", alpha=50.0, factor=1.0), "attention_bias": True}),
    "hunyuan-moe": (
        "hunyuan-moe",
        {"head_dim": 8, "num_experts": 6, "moe_topk": [2, 2, 2], "intermediate_size": 24,
         **_rope("dynamic", alpha=50.0, factor=1.0)},
    ),
    "hyperclovax": ("hyperclovax", {**GRANITE, "head_dim": 16}),
    "hyperclovax-pre": ("hyperclovax", {"use_post_norm": False, "attention_bias": True, "logits_scaling": 0.5}),
    "cwm": ("cwm", {"head_dim": 12, "sliding_window": 9, "num_hidden_layers": 5, "mlp_bias": True}),
    "cwm-layers": (
        "cwm",
        {"head_dim": 8, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2,
         "num_hidden_layers": 4, **_rope("default")},
    ),
    "internlm3": ("internlm3", {"head_dim": 12, **_rope("dynamic", factor=2.0)}),
    "internlm3-biases": ("internlm3", {"head_dim": 8, "qkv_bias": True, "bias": True, "tie_word_embeddings": True}),
    "mimo": ("mimo", {}),
    "minimax-m2": ("minimax-m2", {"num_local_experts": 8, "head_dim": 16, "rotary_dim": 8, "intermediate_size": 24}),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo3": ("olmo3", {"sliding_window": 9, "num_hidden_layers": 4, "rope_parameters": LAYER_ROPES}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}),
    "olmoe-biases": (
        "olmoe",
        {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24, "norm_topk_prob": True,
         "attention_bias": True},
    ),
    "seed-oss": ("seed-oss", {"head_dim": 16}),
    "seed-oss-biases": ("seed-oss", {"head_dim": 12, "attention_out_bias": True, "mlp_bias": True}),
    "solar-open": (
        "solar-open",
        {**GLM_EXPERTS, "attention_bias": True, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "smollm3-windows": (
        "smollm3",
        {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 9, "attention_bias": True,
         "tie_word_embeddings": False, "pad_token_id": 0},
    ),
    "phi3": ("phi3", {"sliding_window": 9, "pad_token_id": 0}),
    "phi3-longrope": (
        "phi3",
        {"pad_token_id": 0, "original_max_position_embeddings": 2,
         "rope_parameters": {"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.75,
                             "short_factor": [1.0] * 3, "long_factor": [1.0, 2.0, 5.0]}},
    ),
}  # fmt: skip
# head sizes that the GPU kernels serve
GPU_VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama-gpu": ("llama", {"head_dim": 128, **VARIANTS["llama-rope-yarn"][1]}),
    "qwen3-gpu": ("qwen3", {"head_dim": 64}),
    "mistral-gpu": ("mistral", {"sliding_window": 9, "head_dim": 64}),
    "mixtral-gpu": ("mixtral", {"head_dim": 64, "num_local_experts": 5}),
    "deepseek-gpu": (  # latents that the CUDA kernel serves; every expert, so that a rounding chooses no other
        "deepseek-v3",
        {
            **LATENT,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 8,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
        },
    ),
}


# Sizes that kernels of GPUs take: of all, and of those with experts and with latent attention.
SIZES_OF_GPUS = {"max_position_embeddings": 160, "hidden_size": 64, "num_attention_heads": 4}
EXPERTS_OF_GPUS = {"head_dim": 64, "num_experts": 32, "moe_intermediate_size": 32, "intermediate_size": 64}
LATENT_OF_GPUS = {
    "n_routed_experts": 32, "moe_intermediate_size": 32, "intermediate_size": 64, "kv_lora_rank": 128,
    "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4,
}  # fmt: skip
