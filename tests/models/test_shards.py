"""Every checkpoint in every format, cut for 2 and 4 ranks and put together again, bit for bit; and what ranks compute
together, which are threads here."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_variants
import torch
from paged_forward import PagedForward
from rank_threads import on_each, parallels
from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError, EngineError
from slipstream.nn.attention.latent import LatentBackend
from slipstream.nn.attention.paged import PagedAttention
from slipstream.nn.decoder import Decoder
from slipstream.nn.embedding import Head, TiedHead
from slipstream.nn.experts import Experts
from slipstream.nn.layer_context import LayerContext
from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.linear import ExpertLinear, Linear
from slipstream.nn.load import load_model
from slipstream.nn.norm import SharedRMSNorm
from slipstream.nn.parallel import SINGLE, Parallel
from slipstream.nn.quant import choose_methods
from slipstream.nn.quant.int4 import Int4
from slipstream.nn.read_spec import read_spec
from slipstream.nn.weights import load_checkpoint
from slipstream_kernels import ops
from stored_formats import STORED, drawn, method_of
from tiny_checkpoints import make_checkpoint, relative_error
from tiny_variants import VARIANTS

CPU = torch.device("cpu")
RANKS = (2, 4)
SHARDS = {  # row shards of 512 features: of 128 in four, a block
    "column": LinearSpec(256, (("q", 512), ("k", 512), ("v", 512)), bias=True, shard="column", unit=32),
    "row": LinearSpec(512, (("o", 128),), bias=True, shard="row", unit=32),
}


def make(name: str, spec: LinearSpec, parallel: Parallel = SINGLE, kind: type[Linear] = Linear) -> Linear:
    method = method_of(name)
    linear = kind(spec, LayerContext(CPU, torch.float32, method, method, parallel))
    generator = torch.Generator().manual_seed(2)
    for _, suffix, slot in sorted(linear.slots(), key=lambda part: not part[2].is_index):
        slot.load(drawn(slot, suffix, generator))
    return linear


def matrix(linear: Linear) -> torch.Tensor:
    """[in, out]: what the weights stand for, exactly, by the product of rows of one feature each."""
    width = linear.spec.in_features if "order" not in linear.weights or linear.spec.columns is None else 512
    weight = replace(linear.weight, bias=None)
    return ops.linear(weight.input_quant.cast(torch.eye(width)), weight)


def rows_of(head: Head | TiedHead) -> torch.Tensor:
    """A head's weight without the rows that pad it."""
    assert isinstance(head, Head)
    return head.weights["weight"][: dict(head.spec.parts)["lm_head"]]


@pytest.mark.parametrize("size", (1, *RANKS))
@pytest.mark.parametrize("name", ["none", "fp8-channel", "fp8-tensor-static", "int8-channel", "int8-packed", "mxfp4"])
def test_a_head_of_any_vocabulary_is_padded(name: str, size: int) -> None:
    """Products of 16 n rows: those behind the vocabulary are zeros."""
    vocab_size = 389
    spec = LinearSpec(512, (("lm_head", vocab_size),), shard="vocabulary")
    unpadded = matrix(make(name, replace(spec, shard="none")))
    found = []
    for rank in range(size):
        head = make(name, spec, Parallel(rank, size))
        assert head.spec.out_features % 16 == 0
        num_rows = dict(head.spec.parts)["lm_head"]
        found.append(matrix(head)[:, :num_rows])
        assert not matrix(head)[:, num_rows:].any()
    assert torch.equal(torch.cat(found, dim=1), unpadded)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("name", STORED)
def test_the_shards_of_a_layer_are_the_layer(name: str, shard: str, size: int) -> None:
    spec = SHARDS[shard]
    whole, ranks = make(name, spec), [make(name, spec, Parallel(rank, size)) for rank in range(size)]
    assert all(rank.spec.num_parameters < whole.spec.num_parameters for rank in ranks)
    if shard == "column":
        parts = zip(*(matrix(rank).chunk(3, dim=1) for rank in ranks))
        assert torch.equal(torch.cat([rows for part in parts for rows in part], dim=1), matrix(whole))
        biases = torch.cat([rows for part in zip(*(r.weights["bias"].chunk(3) for r in ranks)) for rows in part])
    else:
        found = [matrix(rank) for rank in ranks]
        joined = sum(found) if "order" in ranks[0].weights else torch.cat(found)
        assert torch.equal(joined, matrix(whole))
        biases = ranks[0].weights["bias"]
        assert not any("bias" in rank.weights for rank in ranks[1:]), "added once"
    assert torch.equal(biases, whole.weights["bias"])


@pytest.mark.parametrize("name", [name for name in STORED if "act-order" not in name])
def test_ranks_have_whole_blocks(name: str) -> None:
    """21 blocks of 128 features for two ranks: no format has its blocks, groups or kernels' steps cut."""
    gate_up = LinearSpec(128, (("gate", 2688), ("up", 2688)), shard="column", in_blocks=True)
    down = LinearSpec(2688, (("down", 128),), shard="row", in_blocks=True)
    parts = []
    for spec in (gate_up, down):
        whole, ranks = make(name, spec), [make(name, spec, Parallel(rank, 2)) for rank in range(2)]
        widths = [rank.spec.in_features if spec is down else rank.spec.parts[0][1] for rank in ranks]
        assert widths == [11 * 128, 10 * 128]
        parts = [matrix(rank) for rank in ranks]
        if spec is gate_up:
            parts = [torch.cat(part, dim=1) for part in zip(*(own.chunk(2, dim=1) for own in parts))]
        assert torch.equal(torch.cat(parts, dim=1 if spec is gate_up else 0), matrix(whole))


@pytest.mark.parametrize(
    ("features", "widths"),
    [
        (14336, [28, 28, 28, 28]),
        (29568, [58, 58, 58, 57]),
        (11008, [22, 21, 22, 21]),
        (4864, [9.5, 9.5, 9.5, 9.5]),  # of 38 blocks one rank would have 10, and all would wait for it
        (2880, [5.625, 5.625, 5.625, 5.625]),
        (256, [0.5, 0.5, 0.5, 0.5]),
    ],
)
def test_blocks_are_shared_where_that_is_nearly_even(features: int, widths: list[float]) -> None:
    found = [Parallel(rank, 4).blocks_of("gate", features) for rank in range(4)]
    assert [(own.stop - own.start) / 128 for own in found] == widths, "the first has the most: it plans for all"
    assert [own.start for own in found] == [0, *(own.stop for own in found[:-1])] and found[-1].stop == features


EXPERTS = {
    "column": LinearSpec(256, tuple((f"{p}.{e}", 512) for e in range(2) for p in ("gate", "up")), shard="column"),
    "row": LinearSpec(512, (("down.0", 128), ("down.1", 128)), shard="row"),
}


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("shard", EXPERTS)
@pytest.mark.parametrize("name", STORED)
def test_the_shards_of_experts_are_the_experts(
    name: str, shard: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the canonical form, before it is repacked for a kernel; of each rank's experts one below the other."""
    monkeypatch.setattr(ExpertLinear, "_finish", sort_columns)
    spec = replace(EXPERTS[shard], num_experts=2)
    whole = make(name, spec, kind=ExpertLinear)
    ranks = tuple(make(name, spec, Parallel(rank, size), ExpertLinear) for rank in range(size))
    names = set(whole.weights) & {"weight", "values", "packed", "scale", "scales", "zeros", "order"}
    assert names & {"weight", "values", "packed"}
    for key in names:
        tensor, own = whole.weights[key], [rank.weights[key] for rank in ranks]
        if name == "fp8-block" and key == "scale":  # padded beyond the blocks of the input features
            tensor = tensor[:, : whole.spec.in_features // 128]
            own = [scales[:, : rank.spec.in_features // 128] for scales, rank in zip(own, ranks)]
        if shard == "row" or key == "order":
            is_cut = own[0].shape != tensor.shape
            assert torch.equal(torch.cat(own, dim=-1) if is_cut else own[0], tensor)
            continue
        pieces = [part.flatten(0, -2) if part.dim() == 3 else part for part in own]
        by_part = zip(*(part.chunk(4) for part in pieces))  # of four parts, each cut by itself
        found = torch.cat([rows for part in by_part for rows in part])
        assert torch.equal(found.view(tensor.shape), tensor)


def sort_columns(linear: ExpertLinear) -> None:
    if isinstance(linear.method, Int4):
        linear.method._sort_columns(linear.weights)


@pytest.mark.parametrize(
    ("name", "spec", "reason"),
    [
        ("fp8-block", replace(SHARDS["row"], in_features=384), "row|not a multiple|do not begin"),
        ("awq", LinearSpec(256, (("q", 32),), shard="column", unit=4), "not a multiple of 8"),
        ("gptq-v2-act-order", replace(SHARDS["row"], in_features=64, unit=16), "group of 32|not a multiple"),
        ("none", replace(SHARDS["row"], in_features=96), "3 parts of 32 features, which 2 ranks do not share"),
        ("none", LinearSpec(8, (("q", 96),), shard="column", unit=32), "3 parts of 32 features"),
    ],
)
def test_what_ranks_cannot_share_is_refused(name: str, spec: LinearSpec, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        for rank in range(8 if name in ("awq", "gptq-v2-act-order") else 2):
            make(name, spec, Parallel(rank, 8 if name == "awq" else 4 if name == "gptq-v2-act-order" else 2))


def test_a_block_is_not_cut() -> None:
    """192 rows are two blocks' scales, and 96 are one: a rank would scale rows by a neighbour's block."""
    with pytest.raises(ConfigError, match=r"features 96 to 192 of gate.weight_scale_inv do not begin and end with 128"):
        make("fp8-block", LinearSpec(128, (("gate", 192),), shard="column"), Parallel(1, 2))


@pytest.fixture(scope="module", params=list(VARIANTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of eight heads, so that four ranks share them."""
    with pytest.MonkeyPatch.context() as patch:
        for field, value in (("hidden_size", 64), ("num_attention_heads", 8), ("num_key_value_heads", 4)):
            patch.setitem(tiny_variants.SIZES, field, value)
        changes = {**VARIANTS[request.param][1]}
        if changes.get("num_key_value_heads") == 6:
            changes["num_key_value_heads"] = 8
        patch.setitem(VARIANTS, request.param, (VARIANTS[request.param][0], changes))
        return make_checkpoint(request.param, tmp_path_factory.mktemp("c")).path


def load_rank(path: Path, parallel: Parallel) -> Decoder:
    spec = read_spec(path)
    methods = choose_methods(ModelConfig(), spec)
    context = LayerContext(CPU, torch.float32, methods.linears, methods.head, parallel)
    own = spec.of_rank(parallel)
    backend = PagedAttention if PagedAttention.supports(own, CPU, torch.float32) is None else LatentBackend
    decoder = Decoder(spec, context, backend(own), 64)
    load_checkpoint(decoder, path)
    return decoder


@pytest.mark.parametrize("size", RANKS)
def test_the_shards_of_a_checkpoint_are_the_checkpoint(
    checkpoint: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream_kernels.gemm.repack_plain.can_repack", lambda weight: False)  # as they were stored
    whole, ranks = load_rank(checkpoint, SINGLE), [load_rank(checkpoint, Parallel(rank, size)) for rank in range(size)]
    assert torch.equal(torch.cat([rank.embedding.weight for rank in ranks]), whole.embedding.weight)
    if not isinstance(whole.lm_head, TiedHead):
        assert torch.equal(torch.cat([rows_of(rank.lm_head) for rank in ranks]), rows_of(whole.lm_head))
    for layer, shards in zip(whole.layers, zip(*(rank.layers for rank in ranks))):
        for linear, own in zip(layer.linears(), zip(*(shard.linears() for shard in shards))):
            for key in linear.weights.keys() - {"counters"}:  # which no checkpoint has
                tensor = linear.weights[key]
                assert torch.equal(joined(linear.spec, [rank.spec for rank in own], key, own), tensor)
        for (_, norm), *own in zip(layer.norms(), *(shard.norms() for shard in shards)):
            weights = [rank.weight for _, rank in own]
            is_shared = isinstance(own[0][1], SharedRMSNorm)
            found = torch.cat(weights) if is_shared else weights[0]
            assert torch.equal(norm.weight, found) and (is_shared or all(torch.equal(found, one) for one in weights))
    with pytest.raises(EngineError, match="does not compute"):
        ranks[0].embedding(torch.tensor([1]))


def test_ranks_compute_what_one_computes(checkpoint: Path) -> None:
    """All rows in mixed steps, and the last rows of prompts; every rank has the whole logits, to the bit."""
    dice = random.Random(5)
    prompts = [[dice.randrange(tiny_variants.VOCAB_SIZE) for _ in range(length)] for length in (13, 1, 9)]

    def logits(decoder: Decoder) -> torch.Tensor:
        forward, last = PagedForward(decoder, prompts), PagedForward(decoder, prompts)
        return torch.cat([*forward.run([4, 1, 7]), last.step_last({0: 13, 1: 1, 2: 5}, [0, 1])])

    expected = logits(load_rank(checkpoint, SINGLE))
    first, second = on_each([load_rank(checkpoint, parallel) for parallel in parallels(2)], logits)
    assert torch.equal(first, second) and relative_error(first, expected) < 1e-5


@pytest.mark.parametrize("variant", ["llama3-gqa-rope", "minimax-m2", "gpt-oss"])
def test_ranks_share_a_head_of_keys(variant: str, tmp_path: Path) -> None:
    """Two heads of keys for four ranks: with a norm over all heads, and with sinks."""
    path = make_checkpoint(variant, tmp_path, num_attention_heads=8, hidden_size=64).path

    def logits(decoder: Decoder) -> torch.Tensor:
        return PagedForward(decoder, [[3, 7, 5, 60, 2]]).run([5])[0]

    found = on_each([load_rank(path, parallel) for parallel in parallels(4)], logits)
    assert relative_error(found[0], logits(load_rank(path, SINGLE))) < 1e-5
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize(
    ("variant", "sizes", "part"),
    [
        ("llama3-gqa-rope", {}, "q has 2 parts of 32 features"),
        ("deepseek-v3", {}, "q has 2 parts of 32 features"),
        ("deepseek-v2-lite", {}, "q has 2 parts of 32 features"),
        ("qwen2", {"num_attention_heads": 4, "intermediate_size": 2}, "gate has 2 parts of 1 features"),
    ],
)
def test_ranks_do_not_share_a_head_of_queries(variant: str, sizes: dict[str, int], part: str, tmp_path: Path) -> None:
    """As heads of keys: it would be in the sum of all ranks twice."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 64}
    path = make_checkpoint(variant, tmp_path, **{**heads, **sizes}).path
    with pytest.raises(ConfigError, match=f"{part}, which 4 ranks do not share evenly, only a divisor of 2 does"):
        load_rank(path, Parallel(3, 4))


@pytest.mark.parametrize("variant", ["llama3-gqa-rope", "llama-tied"])
def test_a_rank_without_a_row_of_the_vocabulary(variant: str, tmp_path: Path) -> None:
    """33 tokens in rows of 16 are three ranks'."""
    path = make_checkpoint(variant, tmp_path, num_attention_heads=8, hidden_size=64, vocab_size=33).path

    def logits(decoder: Decoder) -> torch.Tensor:
        return PagedForward(decoder, [[3, 7, 5, 32, 2]]).run([5])[0]

    found = on_each([load_rank(path, parallel) for parallel in parallels(4)], logits)
    assert relative_error(found[0], logits(load_rank(path, SINGLE))) < 1e-5
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize(
    "variant",
    ["mixtral", "qwen2-moe", "glm4-moe-groups", "minimax-m2", "granite-moe-shared", "ernie4_5-moe", "gpt-oss"],
)
def test_ranks_have_whole_experts(variant: str, tmp_path: Path) -> None:
    """Some experts get no rows, and some ranks: the last prompt is one token."""
    changes = {"num_local_experts": 6} if variant == "mixtral" else {}
    path = make_checkpoint(variant, tmp_path, num_attention_heads=8, hidden_size=64, **changes).path

    def logits(decoder: Decoder) -> torch.Tensor:
        return torch.cat(PagedForward(decoder, [[3, 7, 5, 60, 2], [9], [4]]).run([4, 1]))

    ranks = [load_rank(path, replace(parallel, splits_experts=True)) for parallel in parallels(2)]
    for experts in [layer.mlp for rank in ranks for layer in rank.layers if isinstance(layer.mlp, Experts)]:
        assert experts.gate_up.spec.num_experts == experts.spec.num_experts // 2
        assert experts.down.spec.in_features == experts.spec.intermediate_size, "whole"
    first, second = on_each(ranks, logits)
    assert torch.equal(first, second) and relative_error(first, logits(load_rank(path, SINGLE))) < 1e-5


QUANTISED = {"fp8": 0.15, "wint8": 0.02, "wint4": 0.0}


@pytest.mark.parametrize("intermediate_size", [128, 2688], ids=["even", "in blocks"])
@pytest.mark.parametrize(("method", "difference"), QUANTISED.items())
def test_ranks_quantise_their_part(method: str, difference: float, intermediate_size: int, tmp_path: Path) -> None:
    """Scales of a row or a token are those of a rank's features, so results differ, but are no worse; scales of groups
    are the same."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes["intermediate_size"] = intermediate_size
    path = make_checkpoint("llama3-gqa-rope", tmp_path, **sizes).path

    def logits(decoder: Decoder) -> torch.Tensor:
        return PagedForward(decoder, [[3, 7, 5, 60, 2, 9, 11, 40]]).run([8])[0]

    group_size = 32 if method == "wint4" else 0
    config = ModelConfig(str(path), device="cpu", quantization=method, quantization_group_size=group_size)
    plain, one = logits(load_model(ModelConfig(str(path), device="cpu"))), logits(load_model(config))
    two, other = on_each([load_model(config, parallel=parallel) for parallel in parallels(2)], logits)
    assert torch.equal(two, other) and relative_error(two, one) <= difference + 1e-5
    assert (two - plain).norm() < 1.3 * (one - plain).norm()


def joined(spec: LinearSpec, own: list[LinearSpec], key: str, ranks: tuple[Linear, ...]) -> torch.Tensor:
    """The ranks' tensors as one; a head of keys that several ranks hold is taken once."""
    tensors = [rank.weights[key] for rank in ranks if key in rank.weights]
    if spec.shard == "none" or (spec.shard == "row" and key == "bias"):
        return tensors[0]
    tensors = [tensor.flatten(0, -2) if tensor.dim() == 3 else tensor for tensor in tensors]
    if spec.shard == "row":
        whole = torch.cat(tensors, dim=1)
    else:
        by_rank = [tensor.split([rows for _, rows in one.parts]) for tensor, one in zip(tensors, own)]
        pieces = []
        for (_, rows), parts in zip(spec.parts, zip(*by_rank)):
            copies = sum(len(part) for part in parts) // rows
            pieces += parts[::copies]
        whole = torch.cat(pieces)
    return whole.unflatten(0, (spec.num_experts, -1)) if spec.num_experts and key != "bias" else whole
