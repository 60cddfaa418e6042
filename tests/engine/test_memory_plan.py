"""The memory plan's arithmetic, and its refusals before any weight is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import make_engine
from slipstream.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.layer_spec import AttentionSpec, DenseSpec, ExpertsSpec, LatentSpec, LayerSpec, RouterSpec
from slipstream.nn.load import load_model, weight_bytes
from slipstream.nn.parallel import Parallel
from slipstream.nn.read_spec import read_spec
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.hardware import Hardware, free_device_memory
from slipstream.worker.plan_memory import plan_memory
from slipstream.worker.workspace import workspace_bytes
from slipstream_kernels import ops
from speculation_config import speculation_config

CPU = Hardware(torch.device("cpu"), torch.float32, torch.float32)
GPU = Hardware(torch.device("cuda"), torch.bfloat16, torch.bfloat16)
GIB = 1 << 30


@pytest.fixture
def spec(tiny_llama: Path) -> DecoderSpec:
    return read_spec(tiny_llama)


def deep(spec: DecoderSpec) -> DecoderSpec:
    """32 layers of eight heads of 128 for keys and values."""
    wide = spec.map_attention(lambda own: replace(own, num_kv_heads=8, head_dim=128))
    return replace(wide, layers=wide.layers[:1] * 32)


def _config(**cache: object) -> EngineConfig:
    return EngineConfig(model=ModelConfig(max_model_len=256), cache=replace(CacheConfig(block_size=16), **cache))


def test_gpu_takes_its_fraction(spec: DecoderSpec) -> None:
    large = replace(deep(spec), max_position_embeddings=8192, vocab_size=512)
    config = replace(_config(memory_fraction=0.5), model=ModelConfig(max_model_len=8192))
    plan = plan_memory(large, config, GPU, 40 * GIB)
    assert plan.block_bytes == 2 * 32 * 8 * 128 * 2 * 16
    remaining = 40 * GIB - plan.weight_bytes - plan.workspace_bytes
    assert plan.num_blocks == remaining // 2 // plan.block_bytes
    assert plan.num_full_sequences == plan.num_blocks // 512
    assert plan.weight_bytes == 2 * large.num_parameters


def test_a_workspace_without_room_is_not_the_context_s_fault(spec: DecoderSpec) -> None:
    config = replace(_config(), scheduler=replace(EngineConfig().scheduler, max_num_batched_tokens=10_000_000))
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=10000000: .*max_num_seqs.*GiB workspace.*fewer"):
        plan_memory(deep(spec), config, GPU, 8 * GIB)


@pytest.mark.parametrize(
    ("quantization", "num_experts", "bytes_per_weight"),
    [("wint4", 0, 2), ("wint4", 4, 2), ("w4a8_fp8", 0, 0), ("w4a8_fp8", 4, 1), ("a8w8_fp8_wint4", 4, 1), ("fp8", 4, 0),
     ("wint8", 0, 2), ("w8a8_int8", 0, 0)],
)  # fmt: skip
def test_the_workspace_holds_weights_written_out(
    spec: DecoderSpec, quantization: str, num_experts: int, bytes_per_weight: int
) -> None:
    experts = ExpertsSpec(512, 4096, num_experts, RouterSpec(2))
    mlp = experts if num_experts else DenseSpec(512, 4096)
    layer = LayerSpec(AttentionSpec(512, 512, 8, 8, 64, spec.layers[0].attention.rope), mlp)
    wide = replace(spec, hidden_size=512, layers=(layer,) * spec.num_layers)
    largest = mlp.gate_up
    plain = plan_memory(wide, _config(), GPU, GIB).workspace_bytes
    config = replace(_config(), model=ModelConfig(max_model_len=256, quantization=quantization))
    more = plan_memory(wide, config, GPU, GIB).workspace_bytes - plain
    of_products = {
        "fp8": ops.fp8_sums_bytes, "a8w8_fp8_wint4": ops.fp8_sums_bytes, "wint4": ops.w4a16_sums_bytes,
        "w4a8_fp8": ops.w4a8_sums_bytes,
    }  # fmt: skip
    sums = 0
    if quantization in of_products:  # of dense layers
        sums = 2 * of_products[quantization](132) - ops.split_sums_bytes(132, 64, is_latent=False)
    assert more == largest.num_parameters * bytes_per_weight + sums
    assert plan_memory(wide, config, CPU, GIB).workspace_bytes == plan_memory(wide, _config(), CPU, GIB).workspace_bytes


@pytest.mark.parametrize(
    ("quantization", "max_num_seqs", "is_counted"),
    [("wint4", 256, False), ("wint4", 512, False), ("wint4", 513, True), ("wint8", 256, False), ("wint8", 257, True),
     ("w4a8_fp8", 1024, False)],
)  # fmt: skip
def test_a_head_that_no_step_has_enough_rows_for_is_not_written_out(
    spec: DecoderSpec, quantization: str, max_num_seqs: int, is_counted: bool
) -> None:
    """It multiplies the sampled rows alone: 1 GB of 128,000 tokens was kept for a copy that nobody makes."""
    layer = LayerSpec(AttentionSpec(512, 512, 8, 8, 64, spec.layers[0].attention.rope), DenseSpec(512, 1024))
    large = replace(spec, hidden_size=512, vocab_size=32768, layers=(layer,), tie_word_embeddings=True)
    scheduler = replace(EngineConfig().scheduler, max_num_seqs=max_num_seqs)
    held = []
    for is_head_too in (False, True):
        model = ModelConfig(max_model_len=256, quantization=quantization, quantize_lm_head=is_head_too)
        held.append(workspace_bytes(large, replace(_config(), model=model, scheduler=scheduler), GPU))
    written_out = 2 * (large.lm_head.num_weights - layer.mlp.gate_up.num_weights)
    assert held[1] - held[0] == (written_out if is_counted else 0)


@pytest.mark.parametrize("quantization", ["wint4", "wint8", "w8a8_int8", "w4a8_fp8", "fp8"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_quantised_head_is_planned_as_it_is_made(tiny_llama: Path, quantization: str, is_tied: bool) -> None:
    config = ModelConfig(
        model=str(tiny_llama), device="cpu", load_format="dummy", quantization=quantization, quantize_lm_head=True,
        quantization_group_size=32 if quantization in ("wint4", "w4a8_fp8") else 0,
    )  # fmt: skip
    spec = replace(read_spec(tiny_llama), tie_word_embeddings=is_tied, stored_format=None)
    model = load_model(config, spec, torch.device("cpu"), torch.float32)
    assert weight_bytes(config, spec, torch.float32) == sum(tensor.nbytes for tensor in model.tensors())


@pytest.mark.parametrize(("num_experts", "is_counted"), [(512, True), (513, False)])
def test_experts_that_are_not_written_out_take_no_workspace(
    spec: DecoderSpec, num_experts: int, is_counted: bool
) -> None:
    """4 GiB of gate_up is the most; then down is the largest."""
    layer = replace(spec.layers[0], mlp=ExpertsSpec(512, 4096, num_experts, RouterSpec(16)))
    wide = replace(spec, hidden_size=512, layers=(layer,))
    configs = [
        replace(_config(), model=ModelConfig(max_model_len=256, quantization=name)) for name in ("none", "wint4")
    ]
    held = [workspace_bytes(wide, config, GPU) for config in configs]
    sums = 2 * ops.w4a16_sums_bytes(132) - ops.split_sums_bytes(132, layer.attention.head_dim, is_latent=False)
    assert held[1] - held[0] == num_experts * 512 * 4096 * 2 * (2 if is_counted else 1) + sums


@pytest.mark.parametrize(("num_tokens", "is_counted"), [(1535, False), (1536, True)])
def test_experts_that_no_step_has_enough_rows_for_are_not_written_out(
    spec: DecoderSpec, num_tokens: int, is_counted: bool
) -> None:
    """From 96 rows of an average expert on, at 8 of 128 for each token."""
    experts = ExpertsSpec(512, 1024, 128, RouterSpec(8))
    wide = replace(spec, hidden_size=512, layers=(replace(spec.layers[0], mlp=experts),))
    scheduler = replace(EngineConfig().scheduler, max_num_batched_tokens=num_tokens)
    models = [ModelConfig(max_model_len=256, quantization=name, cuda_graphs="off") for name in ("none", "wint4")]
    held = [workspace_bytes(wide, replace(_config(), model=model, scheduler=scheduler), GPU) for model in models]
    sums = ops.w4a16_sums_bytes(132) - ops.split_sums_bytes(132, wide.layers[0].attention.head_dim, is_latent=False)
    largest = experts.gate_up if is_counted else max(wide.layers[0].attention.linears, key=lambda one: one.num_weights)
    assert held[1] - held[0] == largest.num_weights * 2 + sums


@pytest.mark.parametrize(
    ("head_dim", "latent", "num_bytes"),
    [
        (128, None, 2 * 132 * 128 * 136 * 4),  # 128 rows: 128 outputs each, maximum and normaliser of each thread's two
        # 64 rows of 512 outputs and two sums, and a count of arrivals
        (192, LatentSpec(512, 128, 64, 128), 2 * 132 * 64 * 514 * 4 + 132 * 4),
        (80, None, 2 * 132 * 128 * 136 * 4),  # in tiles of 128
        (256, None, 2 * 132 * 128 * 264 * 4),
        (112, None, 0),
    ],
)
def test_the_workspace_holds_what_splits_of_keys_leave(
    spec: DecoderSpec, head_dim: int, latent: LatentSpec | None, num_bytes: int
) -> None:
    """In fp32, two for each of a Hopper GPU's 132 SMs."""
    own = deep(spec).map_attention(lambda attention: replace(attention, head_dim=head_dim, latent=latent))
    config = replace(_config(), model=ModelConfig(max_model_len=256, cuda_graphs="off"))
    on_gpu, on_cpu = (workspace_bytes(own, config, replace(CPU, device=torch.device(kind))) for kind in ("cuda", "cpu"))
    assert on_gpu - on_cpu == num_bytes


@pytest.mark.parametrize(("graphs", "num_pools"), [("off", 1), ("auto", 2)])
def test_the_workspace_holds_what_fp8_products_leave(spec: DecoderSpec, graphs: str, num_pools: int) -> None:
    """Two slots of 128 x 256 sums for each SM, in place of attention's, which are less; graphs have theirs apart."""
    models = [ModelConfig(max_model_len=256, quantization=name, cuda_graphs=graphs) for name in ("none", "fp8")]
    plain, fp8 = (workspace_bytes(deep(spec), replace(_config(), model=model), GPU) for model in models)
    assert fp8 - plain == num_pools * 2 * 132 * 128 * 256 * 4 - ops.split_sums_bytes(132, 128, is_latent=False)


@pytest.mark.parametrize(("graphs", "num_pools"), [("off", 1), ("auto", 2)])
def test_the_workspace_holds_the_parts_of_deterministic_sums(spec: DecoderSpec, graphs: str, num_pools: int) -> None:
    """In place of what CUDA's attention leaves; CUDA graphs have theirs apart. Here attention has the most."""
    own = deep(spec).map_attention(lambda attention: replace(attention, num_q_heads=32))
    config = replace(_config(), model=ModelConfig(max_model_len=100_000, cuda_graphs=graphs))
    fixed = replace(config, model=replace(config.model, deterministic=True))
    of_plain, of_fixed = (workspace_bytes(own, one, GPU) for one in (config, fixed))
    parts = ops.invariant_attention_bytes(config.scheduler.max_num_batched_tokens, 32, 8, 128, 100_000, 132)
    assert of_fixed - of_plain == num_pools * parts - ops.split_sums_bytes(132, 128, is_latent=False)
    assert parts > 30 << 20
    on_cpu = [workspace_bytes(own, one, CPU) for one in (config, fixed)]
    assert on_cpu[0] == on_cpu[1]


def test_the_workspace_holds_what_all_ranks_have_of_an_ordered_sum(spec: DecoderSpec) -> None:
    """With two ranks the order does not matter."""
    fixed = replace(_config(), model=ModelConfig(max_model_len=256, deterministic=True))
    more = []
    for size in (2, 4):
        hardware = replace(CPU, parallel=Parallel(size=size))
        more.append(workspace_bytes(spec, fixed, hardware) - workspace_bytes(spec, _config(), hardware))
    assert more == [0, (4 + 1) * fixed.scheduler.max_num_batched_tokens * spec.hidden_size * 4]


def test_the_workspace_holds_the_tables_of_ropes(spec: DecoderSpec) -> None:
    """One of each, however many layers share it; 96 MiB at 192K positions of 128 features."""
    rope = replace(spec.layers[0].attention.rope, rotary_dim=64)  # type: ignore[type-var]
    layers = [replace(spec.layers[0], attention=replace(spec.layers[0].attention, rope=one)) for one in (None, rope)]
    plain, roped = (workspace_bytes(replace(spec, layers=(layer,) * 3), _config(), CPU) for layer in layers)
    assert roped - plain == 256 * 64 * 4


def test_the_workspace_holds_the_logits_of_verifications(spec: DecoderSpec) -> None:
    wide = replace(spec, vocab_size=128_000)
    plain = replace(_config(), scheduler=SchedulerConfig(max_num_seqs=16))
    drafting = replace(plain, speculation=speculation_config(methods="ngram"))
    held = [plan_memory(wide, config, GPU, 8 * GIB).workspace_bytes for config in (plain, drafting)]
    copies = 2 * (512 - 16) * 256 * 4  # of the tokens of penalised rows
    logits = 6 * (512 - 256) * 128_000 * 4
    assert held[1] - held[0] == logits + copies, "six copies in fp32 of as many rows as a graph has"


def test_the_workspace_holds_the_tokens_of_penalised_requests(spec: DecoderSpec) -> None:
    """A row of the longest context for every sequence, and 64 MiB of copies; they were not counted."""
    configs = [
        replace(_config(), model=ModelConfig(max_model_len=131_072), scheduler=SchedulerConfig(max_num_seqs=num_seqs))
        for num_seqs in (128, 256)
    ]
    held = [workspace_bytes(spec, config, CPU) for config in configs]
    assert held[1] - held[0] == 128 * 131_072 * 4


@pytest.mark.parametrize(("method", "num_rows"), [("ngram", 1), ("eagle", 4)])
def test_the_workspace_holds_what_stages_send(spec: DecoderSpec, method: str, num_rows: int) -> None:
    """Behind the first stage, which alone has logits. EAGLE-3 reads the input of three layers."""
    config = replace(_config(), speculation=speculation_config(methods=method))
    alike = replace(spec, layers=spec.layers[:1] * 4)
    of_two, of_four = (Parallel(stage=1, layers=layers) for layers in ((2, 2), (1, 1, 1, 1)))
    held = [workspace_bytes(alike, config, replace(CPU, parallel=parallel)) for parallel in (of_two, of_four)]
    assert held[1] - held[0] == 2 * num_rows * config.scheduler.max_num_batched_tokens * spec.hidden_size * 4


def test_cpu_takes_a_gibibyte_or_what_it_is_told(spec: DecoderSpec) -> None:
    large = deep(spec)
    assert 0.99 * GIB < plan_memory(large, _config(), CPU, 64 * GIB).pool_bytes <= GIB
    assert plan_memory(large, _config(memory_bytes=GIB // 4), CPU, 64 * GIB).pool_bytes == GIB // 4
    assert plan_memory(spec, _config(num_blocks=77), CPU, 64 * GIB).num_blocks == 77


def test_small_models_stop_at_what_is_useful(spec: DecoderSpec) -> None:
    plan = plan_memory(spec, _config(), CPU, 64 * GIB)
    assert plan.num_full_sequences == 2 * 256


def test_the_table_names_every_part(spec: DecoderSpec) -> None:
    table = str(plan_memory(spec, _config(num_blocks=64), CPU, GIB))
    for part in ("1.00 GiB", "weights", "workspace", "KV pool", "64 blocks x 16 tokens", "4 sequences", "256 tokens"):
        assert part in table


@pytest.mark.parametrize(
    ("cache", "field", "says"),
    [
        ({"num_blocks": 15}, "num_blocks", ["15 blocks x 16 tokens", "needs 16 blocks", "max_model_len at most 240"]),
        ({"memory_bytes": 20_000}, "memory_bytes", ["needs 16 blocks", "memory_bytes at least"]),
        ({"num_blocks": 10**9}, "num_blocks", ["does not fit", "at most"]),
        (
            {"memory_bytes": GIB + 1},
            "memory_bytes",
            ["1.00 GiB does not fit", "1.00 GiB free - ", "accepted: at most 1"],
        ),
    ],
)
def test_refusals_show_the_arithmetic(spec: DecoderSpec, cache: dict[str, object], field: str, says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_memory(spec, _config(**cache), CPU, GIB)
    assert caught.value.field == field
    for words in says:
        assert words in str(caught.value)


def _drafting(tiny_llama: Path, **cache: object) -> EngineConfig:
    """The model as its own draft: each block of the cache costs as much again."""
    speculation = speculation_config(methods="draft_model", draft_model=str(tiny_llama))
    return replace(_config(**cache), speculation=speculation)


def test_blocks_that_fit_only_without_the_drafters_are_refused(tiny_llama: Path, spec: DecoderSpec) -> None:
    plan = plan_memory(spec, _drafting(tiny_llama, num_blocks=16), CPU, GIB)
    assert plan.draft_block_bytes == plan.block_bytes > 0
    room = GIB - plan.weight_bytes - plan.workspace_bytes
    num_blocks = room // plan.block_bytes - 1
    assert plan_memory(spec, _config(num_blocks=num_blocks), CPU, GIB).num_blocks == num_blocks, "fits without a draft"
    size = f"{num_blocks * 2 * plan.block_bytes / GIB:.2f} GiB"
    with pytest.raises(ConfigError, match=f"{size} does not fit .* of it the drafter's.; accepted: at most") as caught:
        plan_memory(spec, _drafting(tiny_llama, num_blocks=num_blocks), CPU, GIB)
    most = int(str(caught.value).rpartition(" ")[2])
    assert plan_memory(spec, _drafting(tiny_llama, num_blocks=most), CPU, GIB).num_blocks == most


def test_the_pool_counts_the_drafters_blocks(tiny_llama: Path, spec: DecoderSpec) -> None:
    plan = plan_memory(spec, _drafting(tiny_llama, num_blocks=512), CPU, GIB)
    assert plan.pool_bytes == 2 * 512 * plan.block_bytes
    table = {line.strip().split("  ")[0]: line for line in str(plan).splitlines()}
    assert f"{plan.pool_bytes / (1 << 20):.1f} MiB" in table["KV pool"]
    assert f"{plan.pool_bytes / 2 / (1 << 20):.1f} MiB" in table["of it the drafter's"]
    with pytest.raises(ConfigError, match=f"memory_bytes at least {16 * 2 * plan.block_bytes}, or"):
        plan_memory(spec, _drafting(tiny_llama, memory_bytes=20_000), CPU, GIB)


def test_no_memory_at_all(spec: DecoderSpec) -> None:
    with pytest.raises(ConfigError, match="more free memory"):
        plan_memory(spec, _config(), CPU, 1 << 20)


def test_length_beyond_the_checkpoint(spec: DecoderSpec) -> None:
    config = EngineConfig(model=ModelConfig(max_model_len=513))
    with pytest.raises(ConfigError, match="max_model_len=513: accepted: at most 512"):
        plan_memory(spec, config, CPU, GIB)


@pytest.mark.parametrize(
    ("asked", "resolved"), [(0, "max_model_len=512, the checkpoint's;"), (256, "max_model_len=256;")]
)
def test_a_prompt_that_no_step_can_take_whole_is_refused_at_load(spec: DecoderSpec, asked: int, resolved: str) -> None:
    scheduler = SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=128)
    config = EngineConfig(model=ModelConfig(max_model_len=asked), scheduler=scheduler)
    with pytest.raises(ConfigError, match=f"^max_num_batched_tokens=128: accepted .* at least {resolved} or .* 128"):
        plan_memory(spec, config, CPU, GIB)
    fitting = replace(config, model=ModelConfig(max_model_len=128))
    assert plan_memory(spec, fitting, CPU, GIB).max_model_len == 128


def test_cache_type_is_the_models(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='float16': accepted: auto or bfloat16"):
        make_engine(tiny_llama, model={"dtype": "bfloat16"}, cache={"dtype": "float16"})


def test_refused_before_weights_are_read(tiny_llama: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):  # a checkpoint without any weights
        (tmp_path / name).write_bytes((tiny_llama / name).read_bytes())
    with pytest.raises(ConfigError, match="needs 64 blocks"):
        make_engine(tmp_path, cache={"num_blocks": 63})


def test_host_memory_is_plausible() -> None:
    assert 1 << 26 < free_device_memory(CPU) < 1 << 50
