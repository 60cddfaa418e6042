"""Shapes of the models of the speed benchmarks, and the physical limit of a decode step. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

BYTES_PER_S = 4.3e12  # of an H200's copies; an H100's are 3.0e12
FLOPS_PER_S = {2.0: 790e12, 1.0: 1600e12}


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    rope_theta: float = 1e4
    max_len: int = 65536
    head_dim: int = 128
    experts: int = 1
    experts_of_token: int = 1
    family: tuple[str, str] = ("LlamaForCausalLM", "llama")  # architecture, model_type
    extra: dict[str, object] = field(default_factory=dict)  # what else the family's config.json says

    def linear_parameters(self, experts: float) -> float:
        """Parameters of the layers' products, with this many of their experts."""
        return self.layers * (self.attention_parameters + experts * 3 * self.hidden * self.intermediate)

    @property
    def attention_parameters(self) -> float:
        """Parameters of a layer's attention."""
        return 2 * self.hidden * (self.q_heads + self.kv_heads) * self.head_dim

    @property
    def kv_features(self) -> int:
        """Cached numbers of a token in a layer."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def pair_flops(self) -> int:
        """FLOPs of a query and a key in a layer."""
        return 4 * self.q_heads * self.head_dim

    def limit_s(
        self, batch: int, context: int, weight_bytes: float, kv_bytes: float, bytes_per_s: float = BYTES_PER_S
    ) -> float:
        """Least seconds of a decode step; the head stays in bf16, and tokens choose their experts evenly."""
        head = self.hidden * self.vocab
        kv = self.layers * self.kv_features * kv_bytes * context * batch
        touched = self.experts * (1 - (1 - self.experts_of_token / self.experts) ** batch)
        moved = self.linear_parameters(touched) * weight_bytes + 2 * head + kv
        attention = self.pair_flops * context * self.layers * batch
        flops = 2 * self.linear_parameters(self.experts_of_token) * batch / FLOPS_PER_S[max(1.0, weight_bytes)]
        return max(moved / bytes_per_s, flops + (2 * head * batch + attention) / FLOPS_PER_S[2.0])

    def config(self) -> dict[str, object]:
        """A Hugging Face config.json. Both spellings of the rotary base: transformers 5 reads rope_parameters."""
        return {
            "architectures": [self.family[0]],
            "model_type": self.family[1],
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.q_heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "max_position_embeddings": self.max_len,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.experts_of_token,
            **self.extra,
        }


@dataclass(frozen=True)
class LatentShape(Shape):
    """Latent attention, absorbed. num_shared: experts that every token takes; dense first layers count as others."""

    rank: int = 512
    rope_dim: int = 64
    nope_dim: int = 128
    value_dim: int = 128
    q_rank: int = 0
    num_shared: int = 1

    def linear_parameters(self, experts: float) -> float:
        return super().linear_parameters(experts + self.num_shared)

    @property
    def attention_parameters(self) -> float:
        q_dim = self.q_heads * (self.nope_dim + self.rope_dim)
        queries = self.q_rank * (self.hidden + q_dim) if self.q_rank else self.hidden * q_dim
        of_heads = self.q_heads * (self.rank * (self.nope_dim + self.value_dim) + self.value_dim * self.hidden)
        return queries + self.hidden * self.kv_features + of_heads

    @property
    def kv_features(self) -> int:
        return self.rank + self.rope_dim

    @property
    def pair_flops(self) -> int:
        return 2 * self.q_heads * (2 * self.rank + self.rope_dim)

    def config(self) -> dict[str, object]:
        return {
            **super().config(),
            "num_attention_heads": self.q_heads,
            "num_key_value_heads": self.q_heads,
            "kv_lora_rank": self.rank,
            "q_lora_rank": self.q_rank or None,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
            "moe_intermediate_size": self.intermediate,
            "n_routed_experts": self.experts,
            "n_shared_experts": self.num_shared,
            **self.extra,
        }


MIXTRAL = ("MixtralForCausalLM", "mixtral")
QWEN3_MOE = {
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
QWEN3_235B = {**QWEN3_MOE, "moe_intermediate_size": 1536}
GEMMA3 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "layer_types": 8 * [*5 * ["sliding_attention"], "full_attention"],
    "rope_local_base_freq": 1e4,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    },
}
GPT_OSS = {
    "attention_bias": True,
    "layer_types": 12 * ["sliding_attention", "full_attention"],
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 15e4,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
DEEPSEEK_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40, "original_max_position_embeddings": 4096}
V2_LITE = {
    "intermediate_size": 10944,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "rope_parameters": {**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}
GLM_FLASH = {
    "intermediate_size": 10240,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
V3_SLICE = {  # four layers, one of them dense, of 61
    "intermediate_size": 18432,
    "first_k_dense_replace": 1,
    "n_group": 8,
    "topk_group": 4,
    "rope_parameters": {**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}

SHAPES = {
    "llama3-8b": Shape(4096, 32, 32, 8, 14336, 128256, 5e5, 131072),
    "baichuan2-13b": Shape(5120, 40, 40, 40, 13696, 125696),  # its matrix shapes in the Llama graph (no ALiBi)
    "llama3-1b": Shape(2048, 16, 32, 8, 8192, 128256, 5e5, 131072, 64),
    "llama3-70b": Shape(8192, 80, 64, 8, 28672, 128256, 5e5, 131072),
    "mixtral-8x7b": Shape(4096, 32, 32, 8, 14336, 32000, 1e6, 32768, experts=8, experts_of_token=2, family=MIXTRAL),
    "qwen3-30b-a3b": Shape(
        *(2048, 48, 32, 4, 768, 151936, 1e6, 40960, 128, 128, 8), ("Qwen3MoeForCausalLM", "qwen3_moe"), QWEN3_MOE
    ),
    "qwen3-235b-a22b": Shape(
        *(4096, 94, 64, 4, 1536, 151936, 1e6, 40960, 128, 128, 8), ("Qwen3MoeForCausalLM", "qwen3_moe"), QWEN3_235B
    ),
    "gemma3-12b": Shape(
        *(3840, 48, 16, 8, 15360, 262208, 1e6, 131072, 256), family=("Gemma3ForCausalLM", "gemma3_text"), extra=GEMMA3
    ),
    "gpt-oss-20b": Shape(
        *(2880, 24, 64, 8, 2880, 201088, 15e4, 131072, 64, 32, 4), ("GptOssForCausalLM", "gpt_oss"), GPT_OSS
    ),
    "qwen2.5-7b": Shape(*(3584, 28, 28, 4, 18944, 152064, 1e6, 32768), family=("Qwen2ForCausalLM", "qwen2")),
    "glm4-9b": Shape(
        *(4096, 40, 32, 2, 13696, 151552, 1e4, 32768),
        family=("Glm4ForCausalLM", "glm4"),
        extra={"attention_bias": True, "partial_rotary_factor": 0.5},
    ),
    "phi4": Shape(
        *(5120, 40, 40, 10, 17920, 100352, 25e4, 16384), family=("Phi3ForCausalLM", "phi3"), extra={"pad_token_id": 0}
    ),
    "deepseek-v2-lite": LatentShape(
        *(2048, 27, 16, 16, 1408, 102400, 1e4, 163840, 128, 64, 6),
        ("DeepseekV2ForCausalLM", "deepseek_v2"),
        V2_LITE,
        num_shared=2,
    ),
    "glm-4.7-flash": LatentShape(
        *(2048, 47, 20, 20, 1536, 154880, 1e6, 202752, 128, 64, 4),
        ("Glm4MoeLiteForCausalLM", "glm4_moe_lite"),
        GLM_FLASH,
        nope_dim=192,
        value_dim=256,
        q_rank=768,
    ),
    "deepseek-v3": LatentShape(
        *(7168, 61, 128, 128, 2048, 129280, 1e4, 163840, 128, 256, 8),
        ("DeepseekV3ForCausalLM", "deepseek_v3"),
        {**V3_SLICE, "first_k_dense_replace": 3},
        q_rank=1536,
    ),
    "deepseek-v3-slice": LatentShape(
        *(7168, 4, 128, 128, 2048, 129280, 1e4, 163840, 128, 256, 8),
        ("DeepseekV3ForCausalLM", "deepseek_v3"),
        V3_SLICE,
        q_rank=1536,
    ),
    "demo-latent": LatentShape(
        *(256, 2, 4, 4, 128, 8192, 1e4, 2048, 64, 8, 2),
        ("DeepseekV2ForCausalLM", "deepseek_v2"),
        V2_LITE,
        rank=128,
        rope_dim=32,
        nope_dim=32,
        value_dim=32,
    ),
    "tiny": Shape(1024, 2, 8, 2, 2048, 32000),
    "demo": Shape(384, 6, 6, 2, 1024, 8192, 1e4, 2048, 64),
}


def shape_of(name: str, num_layers: int = 0) -> Shape:
    """num_layers: the first so many of its layers; 0: all."""
    shape = SHAPES[name]
    return replace(shape, layers=min(num_layers, shape.layers)) if num_layers else shape
