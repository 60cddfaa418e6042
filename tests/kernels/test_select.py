"""Choice of implementation, and argument errors that name the argument."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_cases import make_case
from dense_attention import make_batch
from slipstream_kernels import ops

CPU = torch.device("cpu")


def test_auto_takes_the_reference_on_cpu_and_triton_on_cuda(device: torch.device) -> None:
    module = ops.select("norm.rms_norm", "auto", torch.zeros(1, device=device))
    assert module.__name__ == f"slipstream_kernels.norm.{'triton' if device.type == 'cuda' else 'reference'}.rms_norm"


def test_asked_for_but_unsupported_is_an_error_with_the_reason() -> None:
    with pytest.raises(ValueError, match="triton cannot run rms_norm: no such thing"):
        ops.select("norm.rms_norm", "triton", torch.zeros(1), "no such thing")
    with pytest.raises(ValueError, match="'cuda' is not one of auto, reference, triton"):
        ops.select("norm.rms_norm", "cuda", torch.zeros(1))


def test_triton_refuses_what_it_has_no_tile_for() -> None:
    batch = make_batch([1], [3], 2, 1, 48, 16, torch.float32, CPU)
    with pytest.raises(ValueError, match="head_dim 48 is not one of"):
        ops.paged_attention(*batch.arguments(), backend="triton")
    assert ops.paged_attention(*batch.arguments(), backend="auto").isfinite().all()
    case = make_case([1], [3], (2, 1, 64, 16), torch.float32, torch.uint8)
    with pytest.raises(ValueError, match="block_size 16 is not a power of two >= 32"):
        ops.paged_attention(*case.arguments(), backend="triton")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("block_tables", lambda t: t.long()),
        ("seq_lens", lambda t: t.long()),
        ("query_start_loc", lambda t: t[:-1]),
        ("cache.key", lambda t: t.half()),
        ("cache.key", lambda t: t.transpose(2, 3).contiguous().transpose(2, 3)),
        ("cache.value", lambda t: t[:-1]),
        ("q", lambda t: t[0]),
    ],
)
def test_attention_names_the_bad_tensor(name: str, change) -> None:
    batch, field = make_batch([1], [20], 2, 1, 16, 16, torch.float32, CPU), name.replace("cache.", "")
    own = field if hasattr(batch, field) else f"{field}_cache"
    with pytest.raises(ValueError, match=f"^{name}: "):
        ops.paged_attention(*replace(batch, **{own: change(getattr(batch, own))}).arguments())


def test_paged_attention_names_trees_which_it_does_not_know() -> None:
    batch = make_batch([2], [20], 2, 1, 16, 16, torch.float32, CPU)
    with pytest.raises(ValueError, match="tree_mask: paged_attention knows no trees"):
        ops.paged_attention(*batch.arguments(tree_mask=torch.tensor([1, 3])))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("weight", lambda x: ops.rms_norm(x, torch.ones(9), 1e-5)),
        ("residual", lambda x: ops.rms_norm(x, torch.ones(8), 1e-5, x.half())),
        ("x: last dimension", lambda x: ops.rms_norm(x.T, torch.ones(4), 1e-5)),
        ("x: shape", lambda x: ops.silu_mul(x[:, :7])),
        ("seeds, positions", lambda x: ops.sample(x, ops.SamplingMetadata(torch.ones(4)), None, None)),
        ("top_k", lambda x: ops.sample(x, ops.SamplingMetadata(top_k=torch.ones(4)), None, None)),
        ("logits", lambda x: ops.sample(x.int(), ops.SamplingMetadata(), None, None)),
        (
            "num_tokens",
            lambda x: ops.apply_penalties(x, x.long(), *(torch.zeros(n).int() for n in (4, 3)), ops.Penalties()),
        ),
        ("values", lambda x: ops.apply_bias(x, torch.zeros(1).long(), torch.zeros(1).long(), torch.zeros(2))),
        ("token_ids", lambda x: ops.apply_bias(x, torch.zeros(1).long(), torch.tensor([-1]), torch.zeros(1))),
        ("rows", lambda x: ops.apply_bias(x, torch.tensor([x.shape[0]]), torch.zeros(1).long(), torch.zeros(1))),
        ("logits", lambda x: ops.apply_token_masks(x.half(), torch.zeros(1).long(), torch.zeros(1, 1).int())),
        ("rows", lambda x: ops.apply_token_masks(x, torch.zeros(1).int(), torch.zeros(1, 1).int())),
        ("rows: from 0 to 4", lambda x: ops.apply_token_masks(x, torch.tensor([0, 4]), torch.zeros(2, 1).int())),
        ("bits: torch.int64", lambda x: ops.apply_token_masks(x, torch.zeros(1).long(), torch.zeros(1, 1).long())),
        ("bits: shape", lambda x: ops.apply_token_masks(x, torch.zeros(1).long(), torch.zeros(2, 1).int())),
        ("k: 9", lambda x: ops.top_logprobs(x, 9, torch.zeros(4).long())),
    ],
)
def test_every_op_names_the_bad_argument(name: str, call) -> None:
    with pytest.raises(ValueError, match=name):
        call(torch.zeros(4, 8))
