"""config.json as models were published with it, and how many parameters they have."""

from __future__ import annotations

QWEN_ROPE = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "bfloat16", "use_sliding_window": False}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
          "rope_type": "llama3"}  # fmt: skip

LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
          "attention_bias": False}  # fmt: skip
LATENT_FLASH = {**LATENT, "qk_nope_head_dim": 192, "v_head_dim": 256}
DEEPSEEK_YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1,
                 "original_max_position_embeddings": 4096}  # fmt: skip
BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def config(architecture: str, *sizes: int, **fields: object) -> dict[str, object]:
    """sizes: hidden, of the MLP, layers, heads of queries and of keys, words, positions."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "vocab_size", "max_position_embeddings")  # fmt: skip
    return {"architectures": [architecture], **dict(zip(names, sizes, strict=True)), **fields}


# name -> (config.json, parameters)
PUBLISHED = {
    "DeepSeek-R1-Distill-Qwen-1.5B": (
        config("Qwen2ForCausalLM", 1536, 8960, 28, 12, 2, 151936, 131072, **QWEN_ROPE, rope_theta=10000,
               sliding_window=4096, max_window_layers=21, tie_word_embeddings=False, use_mrope=False),
        1_777_088_000,
    ),
    "DeepSeek-R1-Distill-Llama-8B": (
        config("LlamaForCausalLM", 4096, 14336, 32, 32, 8, 128256, 131072, rms_norm_eps=1e-5, rope_theta=500000.0,
               rope_scaling=LLAMA3, attention_bias=False, mlp_bias=False, pretraining_tp=1, torch_dtype="bfloat16"),
        8_030_261_248,
    ),
    "Mistral-Small-24B-Instruct-2501": (
        config("MistralForCausalLM", 5120, 32768, 40, 32, 8, 131072, 32768, head_dim=128, rope_theta=100000000.0,
               sliding_window=None, rms_norm_eps=1e-5, torch_dtype="bfloat16", tie_word_embeddings=False),
        23_572_403_200,
    ),
    "Mixtral-8x7B-v0.1": (
        config("MixtralForCausalLM", 4096, 14336, 32, 32, 8, 32000, 32768, num_local_experts=8, num_experts_per_tok=2,
               rms_norm_eps=1e-5, rope_theta=1000000.0, sliding_window=None, torch_dtype="bfloat16"),
        46_702_792_704,
    ),
    "Qwen1.5-MoE-A2.7B": (
        config("Qwen2MoeForCausalLM", 2048, 5632, 24, 16, 16, 151936, 8192, **QWEN_ROPE, rope_theta=1000000.0,
               decoder_sparse_step=1, moe_intermediate_size=1408, norm_topk_prob=False, num_experts=60,
               num_experts_per_tok=4, shared_expert_intermediate_size=5632, sliding_window=32768,
               max_window_layers=21, qkv_bias=True),
        14_315_784_192,
    ),
    "Qwen3-30B-A3B": (
        config("Qwen3MoeForCausalLM", 2048, 6144, 48, 32, 4, 151936, 40960, **QWEN_ROPE, rope_theta=1000000.0,
               attention_bias=False, decoder_sparse_step=1, head_dim=128, mlp_only_layers=[],
               moe_intermediate_size=768, norm_topk_prob=True, num_experts=128, num_experts_per_tok=8,
               rope_scaling=None, sliding_window=None, max_window_layers=48),
        30_532_122_624,
    ),
    "gpt-oss-20b": (
        config("GptOssForCausalLM", 2880, 2880, 24, 64, 8, 201088, 131072, head_dim=64, rms_norm_eps=1e-5,
               rope_theta=150000, rope_scaling=YARN, sliding_window=128, num_local_experts=32,
               num_experts_per_tok=4, experts_per_token=4, swiglu_limit=7.0, attention_bias=True,
               layer_types=["sliding_attention", "full_attention"] * 12, initial_context_length=4096,
               hidden_act="silu", torch_dtype="bfloat16"),
        20_914_757_184,
    ),
    "GLM-4-9B-0414": (
        config("Glm4ForCausalLM", 4096, 13696, 40, 32, 2, 151552, 32768, head_dim=128, attention_bias=True,
               partial_rotary_factor=0.5, rms_norm_eps=1e-5, rope_theta=10000.0, torch_dtype="bfloat16",
               eos_token_id=[151329, 151336, 151338]),
        9_400_279_040,
    ),
    "GLM-4.5-Air": (
        config("Glm4MoeForCausalLM", 4096, 10944, 46, 96, 8, 151552, 131072, head_dim=128, attention_bias=True,
               use_qk_norm=False, partial_rotary_factor=0.5, moe_intermediate_size=1408, n_routed_experts=128,
               n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=1, norm_topk_prob=True,
               routed_scaling_factor=1.0, n_group=1, topk_group=1, num_nextn_predict_layers=1, rope_theta=1000000,
               rope_scaling=None, rms_norm_eps=1e-5, torch_dtype="bfloat16"),
        106_852_251_264,
    ),
    "DeepSeek-V2-Lite": (
        config("DeepseekV2ForCausalLM", 2048, 10944, 27, 16, 16, 102400, 163840, **LATENT, q_lora_rank=None,
               moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
               first_k_dense_replace=1, moe_layer_freq=1, n_group=1, topk_group=1, topk_method="greedy",
               norm_topk_prob=False, scoring_func="softmax", routed_scaling_factor=1.0, rms_norm_eps=1e-6,
               rope_theta=10000, rope_scaling={**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
               aux_loss_alpha=0.001, ep_size=1, torch_dtype="bfloat16"),
        15_706_484_224,
    ),
    "DeepSeek-V3": (
        config("DeepseekV3ForCausalLM", 7168, 18432, 61, 128, 128, 129280, 163840, **LATENT, q_lora_rank=1536,
               moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
               first_k_dense_replace=3, moe_layer_freq=1, n_group=8, topk_group=4, topk_method="noaux_tc",
               norm_topk_prob=True, scoring_func="sigmoid", routed_scaling_factor=2.5, rms_norm_eps=1e-6,
               rope_theta=10000, rope_scaling={**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
               num_nextn_predict_layers=1, ep_size=1, torch_dtype="bfloat16", quantization_config=BLOCK_FP8),
        671_026_419_200,
    ),
    "GLM-4.7-Flash": (
        config("Glm4MoeLiteForCausalLM", 2048, 10240, 47, 20, 20, 154880, 202752, **LATENT_FLASH, q_lora_rank=768,
               moe_intermediate_size=1536, n_routed_experts=64, n_shared_experts=1, num_experts_per_tok=4,
               first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="noaux_tc", norm_topk_prob=True,
               routed_scaling_factor=1.8, rms_norm_eps=1e-5, rope_theta=1000000, rope_scaling=None,
               num_nextn_predict_layers=1, partial_rotary_factor=1.0, dtype="bfloat16"),
        29_943_393_920,
    ),
    "chatglm3-6b": (
        {"architectures": ["ChatGLMModel"], "add_bias_linear": False, "add_qkv_bias": True,
         "apply_query_key_layer_scaling": True, "apply_residual_connection_post_layernorm": False,
         "ffn_hidden_size": 13696, "hidden_size": 4096, "kv_channels": 128, "layernorm_epsilon": 1e-5,
         "multi_query_attention": True, "multi_query_group_num": 2, "num_attention_heads": 32, "num_layers": 28,
         "original_rope": True, "padded_vocab_size": 65024, "post_layer_norm": True, "rmsnorm": True,
         "seq_length": 8192, "torch_dtype": "float16", "tie_word_embeddings": False, "eos_token_id": 2},
        6_243_584_000,
    ),
    "Baichuan2-7B-Chat": (
        config("BaichuanForCausalLM", 4096, 11008, 32, 32, 32, 125696, 4096, rms_norm_eps=1e-6, hidden_act="silu",
               model_max_length=4096, torch_dtype="bfloat16", tie_word_embeddings=False, z_loss_weight=0),
        7_505_973_248,
    ),
    "Baichuan2-13B-Chat": (
        {"architectures": ["BaichuanForCausalLM"], "hidden_size": 5120, "intermediate_size": 13696,
         "num_hidden_layers": 40, "num_attention_heads": 40, "vocab_size": 125696, "model_max_length": 4096,
         "rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False},
        13_896_668_160,
    ),
    "gemma-2-9b": (
        config("Gemma2ForCausalLM", 3584, 14336, 42, 16, 8, 256000, 8192, head_dim=256, rms_norm_eps=1e-6,
               hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
               attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=4096, rope_theta=10000.0,
               torch_dtype="float32"),
        9_241_705_984,
    ),
    "gemma-3-1b-it": (
        config("Gemma3ForCausalLM", 1152, 6912, 26, 4, 1, 262144, 32768, head_dim=256, rms_norm_eps=1e-6,
               hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, attn_logit_softcapping=None,
               final_logit_softcapping=None, sliding_window=512, sliding_window_pattern=6, rope_theta=1000000,
               rope_local_base_freq=10000, rope_scaling=None, torch_dtype="bfloat16", cache_implementation="hybrid"),
        999_885_952,
    ),
    "phi-4": (
        config("Phi3ForCausalLM", 5120, 17920, 40, 40, 10, 100352, 16384, original_max_position_embeddings=16384,
               rms_norm_eps=1e-5, rope_scaling=None, rope_theta=250000, sliding_window=None, attention_bias=False,
               torch_dtype="bfloat16", tie_word_embeddings=False),
        14_659_507_200,
    ),
    "Phi-4-mini-instruct": (
        config("Phi3ForCausalLM", 3072, 8192, 32, 24, 8, 200064, 131072, original_max_position_embeddings=4096,
               partial_rotary_factor=0.75, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=262144,
               tie_word_embeddings=True, torch_dtype="bfloat16",
               rope_scaling={"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}),
        3_836_021_760,
    ),
    "granite-3.1-8b-instruct": (
        config("GraniteForCausalLM", 4096, 12800, 40, 32, 8, 49155, 131072, attention_multiplier=0.0078125,
               embedding_multiplier=12.0, logits_scaling=16.0, residual_multiplier=0.22, rms_norm_eps=1e-5,
               rope_theta=10000000.0, rope_scaling=None, tie_word_embeddings=True, torch_dtype="bfloat16"),
        8_170_848_256,
    ),
    "granite-3.1-1b-a400m-instruct": (
        config("GraniteMoeForCausalLM", 1024, 512, 24, 16, 8, 49155, 131072, attention_multiplier=0.015625,
               embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.22, num_local_experts=32,
               num_experts_per_tok=8, rms_norm_eps=1e-6, rope_theta=1500000.0, rope_scaling=None,
               attention_bias=False, tie_word_embeddings=True, torch_dtype="bfloat16"),
        1_334_628_352,
    ),
    "granite-4.0-micro": (
        config("GraniteMoeHybridForCausalLM", 2560, 8192, 40, 40, 8, 100352, 131072, attention_multiplier=0.015625,
               embedding_multiplier=12, logits_scaling=10, residual_multiplier=0.22, num_local_experts=0,
               num_experts_per_tok=0, shared_intermediate_size=8192, position_embedding_type="rope",
               layer_types=["attention"] * 40, rms_norm_eps=1e-5, rope_theta=10000000, attention_bias=False,
               tie_word_embeddings=True, torch_dtype="bfloat16"),
        3_402_836_480,
    ),
    "OLMo-2-1124-7B": (
        config("Olmo2ForCausalLM", 4096, 11008, 32, 32, 32, 100352, 4096, rms_norm_eps=1e-6, rope_theta=500000,
               rope_scaling=None, attention_bias=False, tie_word_embeddings=False, torch_dtype="float32"),
        7_298_617_344,
    ),
    "Olmo-3-1025-7B": (
        config("Olmo3ForCausalLM", 4096, 11008, 32, 32, 32, 100278, 65536, rms_norm_eps=1e-6, rope_theta=500000,
               rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
               sliding_window=4096, attention_bias=False, tie_word_embeddings=False, torch_dtype="bfloat16"),
        7_298_011_136,
    ),
    "OLMoE-1B-7B-0924": (
        config("OlmoeForCausalLM", 2048, 1024, 16, 16, 16, 50304, 4096, num_experts=64, num_experts_per_tok=8,
               norm_topk_prob=False, clip_qkv=None, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None,
               attention_bias=False, eos_token_id=50279, tie_word_embeddings=False, torch_dtype="bfloat16"),
        6_919_161_856,
    ),
    "dots.llm1.inst": (
        config("Dots1ForCausalLM", 4096, 10944, 62, 32, 32, 152064, 32768, moe_intermediate_size=1408,
               n_routed_experts=128, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1,
               norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="noaux_tc", n_group=1, topk_group=1,
               attention_bias=False, rms_norm_eps=1e-5, rope_theta=10000000, rope_scaling=None, sliding_window=None,
               max_window_layers=62, tie_word_embeddings=False, torch_dtype="bfloat16"),
        142_774_381_696,
    ),
    "EXAONE-4.0-32B": (
        config("Exaone4ForCausalLM", 5120, 27392, 64, 40, 8, 102400, 131072, head_dim=128, rms_norm_eps=1e-5,
               rope_theta=1000000, rope_scaling={**LLAMA3, "factor": 16.0}, sliding_window=4096,
               sliding_window_pattern="LLLG", layer_types=[*["sliding_attention"] * 3, "full_attention"] * 16,
               tie_word_embeddings=False, torch_dtype="bfloat16"),
        32_003_216_384,
    ),
    "Hunyuan-A13B-Instruct": (
        config("HunYuanMoEV1ForCausalLM", 4096, 3072, 32, 32, 8, 128167, 32768, head_dim=128, num_experts=64,
               moe_topk=[8] * 32, moe_intermediate_size=[3072] * 32, num_shared_expert=[1] * 32, rms_norm_eps=1e-5,
               rope_theta=10000.0, rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32,
                                                 "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
               attention_bias=False, tie_word_embeddings=True, torch_dtype="bfloat16"),
        80_393_183_232,
    ),
    "internlm3-8b-instruct": (
        config("InternLM3ForCausalLM", 4096, 10240, 48, 32, 2, 128512, 32768, head_dim=128, bias=False, qkv_bias=False,
               rms_norm_eps=1e-5, rope_theta=50000000, rope_scaling={"factor": 6.0, "rope_type": "dynamic"},
               tie_word_embeddings=False, torch_dtype="bfloat16"),
        8_804_241_408,
    ),
    "HyperCLOVAX-SEED-Think-14B": (
        config("HyperCLOVAXForCausalLM", 6144, 14336, 38, 48, 8, 110592, 131072, head_dim=128, rms_norm_eps=1e-5,
               attention_multiplier=0.0078125, embedding_multiplier=10.0, logits_scaling=0.125,
               residual_multiplier=1.0, use_post_norm=True, rope_theta=100000000, rope_scaling=None,
               attention_bias=False, mlp_bias=False, tie_word_embeddings=False, torch_dtype="bfloat16"),
        14_748_112_896,
    ),
    "cwm": (
        config("CwmForCausalLM", 6144, 21504, 64, 48, 8, 128256, 131072, head_dim=128, rms_norm_eps=1e-5,
               rope_theta=1000000.0, rope_scaling={**LLAMA3, "factor": 16.0}, sliding_window=8192,
               layer_types=["full_attention", *["sliding_attention"] * 3] * 16, mlp_bias=False,
               tie_word_embeddings=False, torch_dtype="bfloat16"),
        32_581_097_472,
    ),
    "Solar-Open-100B": (
        config("SolarOpenForCausalLM", 4096, 10240, 48, 64, 8, 196608, 131072, head_dim=128, rms_norm_eps=1e-5,
               moe_intermediate_size=1280, n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8,
               norm_topk_prob=True, routed_scaling_factor=1.0, n_group=1, topk_group=1, rope_theta=1000000,
               attention_bias=False, tie_word_embeddings=False, torch_dtype="bfloat16"),
        102_651_799_552,
    ),
    "Seed-OSS-36B-Instruct": (
        config("SeedOssForCausalLM", 5120, 27648, 64, 80, 8, 155136, 524288, head_dim=128, attention_bias=True,
               attention_out_bias=False, mlp_bias=False, rms_norm_eps=1e-6, rope_theta=10000000.0,
               rope_scaling={"rope_type": "default"}, residual_dropout=0.1, tie_word_embeddings=False,
               torch_dtype="bfloat16"),
        36_151_104_512,
    ),
    "ERNIE-4.5-0.3B-PT": (
        config("Ernie4_5ForCausalLM", 1024, 3072, 18, 16, 2, 103424, 131072, head_dim=128, rms_norm_eps=1e-5,
               rope_theta=500000.0, rope_scaling=None, use_bias=False, tie_word_embeddings=True,
               torch_dtype="bfloat16"),
        360_748_032,
    ),
    "ERNIE-4.5-21B-A3B-PT": (
        config("Ernie4_5_MoeForCausalLM", 2560, 12288, 28, 20, 4, 103424, 131072, rms_norm_eps=1e-5,
               rope_theta=500000.0, rope_scaling=None, use_bias=False, tie_word_embeddings=True, moe_num_experts=64,
               moe_k=6, moe_intermediate_size=1536, moe_num_shared_experts=2, moe_layer_start_index=1,
               moe_layer_end_index=27, moe_layer_interval=1, moe_use_aux_free=True, torch_dtype="bfloat16"),
        21_825_437_888,
    ),
    "gemma-7b": (
        config("GemmaForCausalLM", 3072, 24576, 28, 16, 16, 256000, 8192, head_dim=256, hidden_act="gelu",
               hidden_activation=None, rms_norm_eps=1e-6, rope_theta=10000.0, rope_scaling=None,
               attention_bias=False, eos_token_id=1, torch_dtype="bfloat16"),
        8_537_680_896,
    ),
    "SmolLM3-3B": (
        config("SmolLM3ForCausalLM", 2048, 11008, 36, 16, 4, 128256, 65536, hidden_act="silu", rms_norm_eps=1e-6,
               rope_theta=5000000.0, rope_scaling=None, no_rope_layers=[1, 1, 1, 0] * 9, no_rope_layer_interval=4,
               attention_bias=False, mlp_bias=False, use_sliding_window=False, sliding_window=None,
               layer_types=["full_attention"] * 36, eos_token_id=128012, torch_dtype="bfloat16"),
        3_075_098_624,
    ),
    "MiniMax-M2": (
        config("MiniMaxM2ForCausalLM", 3072, 1536, 62, 48, 8, 200064, 196608, head_dim=128, rotary_dim=64,
               num_local_experts=256, num_experts_per_tok=8, scoring_func="sigmoid", use_routing_bias=True,
               use_qk_norm=True, qk_norm_type="per_layer", attn_type_list=[1] * 62, rms_norm_eps=1e-6,
               rope_theta=5000000, tie_word_embeddings=False, torch_dtype="bfloat16"),
        228_689_764_864,
    ),
}  # fmt: skip
