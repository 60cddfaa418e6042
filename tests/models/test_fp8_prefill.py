"""`prefill_attention_dtype: fp8`: means of keys from build/key_means.py, what rounding costs, and every refusal."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from key_means_of import draw_key_means
from packed_text import make_packed_text
from paged_forward import PagedForward
from rank_threads import on_each, parallels
from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.attention import ATTENTION_BACKENDS
from slipstream.nn.key_means import FILE, read_key_means, rounding_refusal, write_key_means
from slipstream.nn.load import check_model, load_model
from slipstream.nn.parallel import SINGLE, Parallel
from slipstream.nn.read_spec import read_spec
from slipstream_kernels import ops
from tiny_checkpoints import make_checkpoint, relative_error

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build"))
import key_means

CPU = torch.device("cpu")
PROMPT = [(7 * position) % 89 + 3 for position in range(60)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the means of its keys, from the tool."""
    folder = tmp_path_factory.mktemp("measured")
    make_checkpoint("qwen3", folder)
    text = make_packed_text(tmp_path_factory.mktemp("text"))
    arguments = ["key_means.py", "--model", str(folder), "--text", str(text), "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*arguments, "--num-tokens", "192", "--window-tokens", "64"])
        key_means.main()
    return folder


def loaded(folder: Path, kind: str) -> PagedForward:
    decoder = load_model(ModelConfig(model=str(folder), device="cpu", prefill_attention_dtype=kind))
    return PagedForward(decoder, [PROMPT])


def test_the_tool_measures_means_of_rotated_keys(measured: Path) -> None:
    """Those of the cache itself, over the same windows."""
    means = read_key_means(measured, read_spec(measured))
    assert [tuple(mean.shape) for mean in means] == [(2, 16)] * 3
    decoder = load_model(ModelConfig(model=str(measured), device="cpu"))
    windows = torch.tensor(PROMPT).view(1, 60)
    [mean, *_], errors = key_means.measure(decoder, windows)
    forward = PagedForward(decoder, [PROMPT])
    forward.run([60])
    keys = forward.kv_caches[0].key[forward.block_ids[0]].transpose(1, 2).flatten(0, 1)[:60]
    torch.testing.assert_close(mean, keys.mean(0), rtol=1e-4, atol=1e-5)
    assert all(0 < less < 0.1 and 0 < plain < 0.5 for plain, less in errors)


@pytest.mark.parametrize(("variant", "told"), [("gemma2", "soft caps"), ("qwen3", "window-tokens.* 64")])
def test_the_tool_refuses_before_it_reads_weights(
    variant: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (make_checkpoint(variant, tmp_path).path / "model.safetensors").unlink()
    arguments = ["--model", str(tmp_path), "--text", "nowhere", "--device", "cpu", "--window-tokens", "65"]
    monkeypatch.setattr(sys, "argv", ["key_means.py", *arguments])
    with pytest.raises(SystemExit, match=told):
        key_means.main()


def test_prompts_are_rounded_and_caches_and_decodes_are_not(measured: Path) -> None:
    exact, rounded = loaded(measured, "auto"), loaded(measured, "fp8")
    whole, ours = exact.run([60])[0], rounded.run([60])[0]
    assert 1e-3 < relative_error(ours, whole) < 0.15
    first = [forward.kv_caches[0].key[forward.block_ids[0]] for forward in (exact, rounded)]
    assert torch.equal(*first)  # keys are cached as they are: blocks do not depend on the means
    steps = loaded(measured, "fp8").run([4])[0]
    assert relative_error(steps, whole) < 1e-4


def test_16_bit_is_what_a_cpu_does_anyway(measured: Path) -> None:
    assert torch.equal(loaded(measured, "16bit").run([60])[0], loaded(measured, "auto").run([60])[0])


@pytest.fixture(scope="module")
def distinct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose layers and heads have means that would round another's keys very differently."""
    folder = tmp_path_factory.mktemp("distinct")
    make_checkpoint("qwen3", folder, num_attention_heads=8, hidden_size=64)
    draw_key_means(folder)
    return folder


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_take_the_means_of_their_heads(distinct: Path, size: int) -> None:
    """Two heads of keys: one each, and one for two ranks. Sums of ranks differ in their last bits, which moves some
    numbers to the next of e4m3."""

    def logits(parallel: Parallel) -> torch.Tensor:
        config = ModelConfig(model=str(distinct), device="cpu", prefill_attention_dtype="fp8")
        return PagedForward(load_model(config, parallel=parallel), [PROMPT]).run([60])[0]

    expected, exact = logits(SINGLE), loaded(distinct, "auto").run([60])[0]
    assert relative_error(expected, exact) > 0.05
    for found in on_each(parallels(size), logits):
        assert relative_error(found, expected) < 1e-3


def test_stages_take_the_means_of_their_layers(distinct: Path) -> None:
    config = ModelConfig(model=str(distinct), device="cpu", prefill_attention_dtype="fp8")
    stages = [load_model(config, parallel=Parallel(stage=stage, layers=(1, 2))) for stage in range(2)]
    forward = PagedForward(stages[0], [PROMPT])
    batch, stream = forward._batch({0: 60}), stages[0].embedding(torch.tensor(PROMPT))
    for stage in stages:
        own = stage.own_indices
        stream = stage.forward_stage(stream, batch, forward.kv_caches[own.start : own.stop], False)
    found = stages[0].logits(stages[0].rows_of_stream(stream, 60))
    assert torch.equal(found, loaded(distinct, "fp8").run([60])[0])


@pytest.mark.parametrize(
    ("variant", "fields", "named"),
    [
        ("gemma2", {}, "attention in FP8 has no soft caps, sinks and ALiBi"),
        ("gpt-oss", {}, "attention in FP8 has no soft caps, sinks and ALiBi"),
        ("deepseek-v2-lite", {}, "latent attention has no keys of heads"),
        ("qwen3", {"deterministic": True}, "deterministic rounds nothing"),
        ("qwen3", {}, f"needs .*{FILE}; make it: build/key_means.py"),
    ],
)
def test_refusals(variant: str, fields: dict[str, object], named: str, tmp_path: Path) -> None:
    make_checkpoint(variant, tmp_path)
    config = ModelConfig(model=str(tmp_path), device="cpu", prefill_attention_dtype="fp8", **fields)
    with pytest.raises(ConfigError, match=f"prefill_attention_dtype='fp8': {named}.*accepted.*: auto or 16bit"):
        load_model(config)


def test_a_cache_of_integers_is_refused(measured: Path) -> None:
    config = ModelConfig(model=str(measured), device="cpu", prefill_attention_dtype="fp8")
    for kv_dtype in (torch.int8, torch.uint8):
        with pytest.raises(ConfigError, match="an int8 or int4 KV cache is attended in 16 bit"):
            load_model(config, kv_dtype=kv_dtype)


def test_over_an_fp8_cache_no_file_is_needed(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    config = ModelConfig(model=str(tmp_path), device="cpu", prefill_attention_dtype="fp8")
    kv_dtype = ops.QUANTIZED_KV_DTYPES["fp8_e4m3"]
    check_model(config, read_spec(tmp_path), CPU, torch.float32, kv_dtype)
    options = [layer.attention.layer.options for layer in load_model(config, kv_dtype=kv_dtype).layers]
    assert all(option.fp8_probs and option.key_mean is None for option in options)


def test_the_backend_that_rounds_queries_tells_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("qwen3", tmp_path)
    config = ModelConfig(model=str(tmp_path), device="cpu", load_format="dummy")
    for wanted in ("paged", "split_kv_fp8"):
        monkeypatch.setattr(ATTENTION_BACKENDS.get(wanted), "supports", staticmethod(lambda *_: None))
        decoder = load_model(replace(config, attention_backend=wanted), kv_dtype=torch.float8_e4m3fn)
        rounded = {layer.attention.layer.options.fp8_queries for layer in decoder.layers}
        assert rounded == {wanted == "split_kv_fp8"}


@pytest.mark.parametrize(
    ("wanted", "device", "kv_dtype", "refused"),
    [
        ("fp8", "cuda", torch.float8_e4m3fn, {"split_kv": "it rounds no queries", "paged": "it rounds no queries"}),
        ("fp8", "cuda", None, {}),
        ("fp8", "cpu", torch.float8_e4m3fn, {}),  # a CPU rounds nothing, and serves configurations of GPUs
        ("16bit", "cuda", torch.float8_e4m3fn, {"split_kv_fp8": "it rounds queries"}),
        ("auto", "cuda", torch.float8_e4m3fn, {}),
    ],
)
def test_backends_that_attend_otherwise_are_refused(
    wanted: str, device: str, kv_dtype: torch.dtype | None, refused: dict[str, str]
) -> None:
    config = ModelConfig(model="m", prefill_attention_dtype=wanted)
    for name in ("split_kv_fp8", "split_kv", "paged"):
        reason = rounding_refusal(ATTENTION_BACKENDS.get(name), config, torch.device(device), kv_dtype)
        assert refused.get(name, "None") in str(reason)


def test_a_wrong_file_is_named(measured: Path, tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    spec, config = read_spec(tmp_path), ModelConfig(model=str(tmp_path), prefill_attention_dtype="fp8")
    means = read_key_means(measured, spec)
    for wrong in (means[:2], [means[0], means[1][:, :8], means[2]], [means[0], means[1] / 0.0, means[2]]):
        write_key_means(tmp_path / FILE, wrong, {})
        with pytest.raises(ConfigError, match=rf"{FILE}: layers.[12].key_mean must be finite numbers of shape \(2, 16"):
            check_model(config, spec, CPU, torch.float32)
    (tmp_path / FILE).write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        check_model(config, spec, CPU, torch.float32)


def test_random_weights_need_no_file(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    config = ModelConfig(model=str(tmp_path), device="cpu", prefill_attention_dtype="fp8", load_format="dummy")
    assert all(not layer.attention.layer.options.key_mean.any() for layer in load_model(config).layers)
