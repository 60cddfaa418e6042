"""Routing rules against the routers of Hugging Face's models: which experts, and with what weights."""

from __future__ import annotations

import pytest
import torch
from slipstream_kernels import ops
from slipstream_kernels.ops import RoutingRule
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    MiniMaxM2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

NUM_TOKENS, HIDDEN, NUM_EXPERTS, TOP_K = 40, 16, 12, 3
SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP_K, "num_attention_heads": 4}
GROUPS = {"n_routed_experts": NUM_EXPERTS, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
GROUPED = RoutingRule("sigmoid", scale=2.5, num_groups=4, topk_groups=2, group_score="top2sum")
CASES = {
    "qwen2-moe": (
        lambda: Qwen2MoeTopKRouter(Qwen2MoeConfig(**SIZES, num_experts=NUM_EXPERTS, norm_topk_prob=False)),
        RoutingRule(renormalises=False),
    ),
    "qwen3-moe": (
        lambda: Qwen3MoeTopKRouter(Qwen3MoeConfig(**SIZES, num_experts=NUM_EXPERTS, norm_topk_prob=True)),
        RoutingRule(),
    ),
    "deepseek-v2": (
        lambda: DeepseekV2TopkRouter(DeepseekV2Config(**SIZES, **GROUPS, topk_method="group_limited_greedy")),
        RoutingRule(renormalises=False, scale=2.5, num_groups=4, topk_groups=2),
    ),
    "deepseek-v3": (lambda: DeepseekV3TopkRouter(DeepseekV3Config(**SIZES, **GROUPS)), GROUPED),
    "glm4-moe": (lambda: Glm4MoeTopkRouter(Glm4MoeConfig(**SIZES, **GROUPS)), GROUPED),
    "minimax-m2": (
        lambda: MiniMaxM2TopKRouter(MiniMaxM2Config(**SIZES, num_local_experts=NUM_EXPERTS)),
        RoutingRule("sigmoid"),
    ),
    "ernie4_5-moe": (
        lambda: Ernie4_5_MoeTopKRouter(
            Ernie4_5_MoeConfig(hidden_size=HIDDEN, moe_num_experts=NUM_EXPERTS, moe_k=TOP_K, num_attention_heads=4)
        ),
        RoutingRule(),
    ),
    "gpt-oss": (lambda: GptOssTopKRouter(GptOssConfig(**SIZES, num_local_experts=NUM_EXPERTS)), RoutingRule()),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_experts_and_weights(name: str) -> None:
    make, rule = CASES[name]
    torch.manual_seed(5)
    router = make()
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_(0.0, 0.7)
    # so low that ranks of experts are negative: those of groups that are left out must not come before them
    has_bias = rule.score == "sigmoid" or isinstance(router, Ernie4_5_MoeTopKRouter)
    bias = torch.randn(NUM_EXPERTS) - 1.0 if has_bias else None
    hidden = torch.randn(NUM_TOKENS, HIDDEN)
    with torch.no_grad():
        logits, weights, experts = run(router, hidden, bias)
    routing = ops.route_experts(logits, TOP_K, rule, selection_bias=bias)
    expected = torch.zeros(NUM_TOKENS, NUM_EXPERTS).scatter_(1, experts, weights.float())
    torch.testing.assert_close(dense(routing), expected, rtol=1e-5, atol=1e-6)


def run(router: nn.Module, hidden: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if isinstance(router, MiniMaxM2TopKRouter):
        return router(hidden, bias)
    if isinstance(router, Ernie4_5_MoeTopKRouter):
        router.moe_statics.e_score_correction_bias.copy_(bias)
    elif bias is not None:
        router.e_score_correction_bias.copy_(bias)
    return router(hidden)


def dense(routing: ops.Routing) -> Tensor:
    """[num_tokens, num_experts]: each token's weights at its experts."""
    experts = torch.searchsorted(routing.offsets, routing.rows, right=True) - 1
    return torch.zeros(routing.num_tokens, routing.num_experts).scatter_(1, experts, routing.weights)
