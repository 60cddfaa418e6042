"""build/quantize.py, build/evaluate.py: what they write loads here and in transformers, and is close to the model."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_text import make_packed_text
from quantise_tiny import quantise
from quantized_checkpoints import PROMPT, load, logits, make_full, rms_error
from safetensors.torch import load_file, save_file
from slipstream.core.chat_messages import TEMPLATE_FOLDER
from slipstream.core.errors import ConfigError
from tiny_checkpoints import make_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build"))
import evaluate
import quantize
from quantization.calibration import LayerWalk, load_recorded
from quantization.export import ShardWriter
from quantization.gptq import Feedback, round_by_feedback
from quantization.grids import int4_grid
from quantization.measures import compare
from quantization.text import cut_windows

make = partial(quantise, num_tokens=512)
needs_library = pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="needs compressed-tensors (dev)")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two query heads for each head of keys and values."""
    return make_full(tmp_path_factory.mktemp("full"), num_key_value_heads=2, head_dim=64)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_packed_text(tmp_path_factory.mktemp("text"))


COMPRESSED = [
    ("fp8", "", 1e-4),
    ("block_wise_fp8", "gptq", 1e-4),
    ("wint8", "gptq", 1e-4),
    ("w8a8_int8", "smoothquant", 0.05),  # rows are scaled by amax / 127 here, by amax / 127.5 there
    ("wint4", "gptq", 1e-4),
    ("wint4", "awq,gptq", 1e-4),
    ("w4a8_fp8", "awq", 1e-4),
]


OPTIONS = [
    ("wint4", ["--group-size", "-1", "--lm-head"], 1e-4),
    ("wint8", ["--lm-head"], 1e-4),
]


@needs_library
@pytest.mark.parametrize(
    ("method", "options", "bound"),
    [*((method, ["--algorithm", algorithm], bound) for method, algorithm, bound in COMPRESSED), *OPTIONS],
)
def test_compressed_tensors_load_here_and_in_transformers(
    full: Path, text: Path, tmp_path: Path, method: str, options: list[str], bound: float
) -> None:
    from transformers import AutoModelForCausalLM

    made = make(full, text, tmp_path / "made", "--method", method, *options)
    decoder = load(made)
    assert decoder.spec.stored_format is not None and decoder.spec.stored_format.method == method
    ours = logits(decoder)
    assert 0.002 < rms_error(ours, logits(load(full))) < 0.4
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)(torch.tensor([PROMPT])).logits[0]
    assert rms_error(ours, theirs) < bound


@needs_library
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("wint4", ["--zeros", "--group-size", "32"]),  # for which transformers 5.23 makes tensors of the wrong shape
        ("wint4", ["--group-size", "64"]),
        ("w4a8_fp8", ["--group-size", "-1"]),
        ("wint8", []),
        ("w8a8_int8", []),
        ("fp8", []),
        ("block_wise_fp8", []),
    ],
)
def test_the_library_unpacks_the_weights_that_are_multiplied(
    full: Path, text: Path, tmp_path: Path, method: str, options: list[str]
) -> None:
    """Module by module, by compressed-tensors' own code, against products of unit vectors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    made = make(full, text, tmp_path / "made", "--method", method, *options)
    group = json.loads((made / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    compressor, tensors = BaseCompressor.get_value_from_registry(group["format"]), load_file(made / "model.safetensors")
    linear = load(made).layers[1].mlp.down
    module = "model.layers.1.mlp.down_proj."
    stored = {name.removeprefix(module): tensor for name, tensor in tensors.items() if name.startswith(module)}
    weight = compressor.decompress(stored, QuantizationScheme.model_validate(group))["weight"]
    torch.testing.assert_close(linear(torch.eye(384)).t(), weight.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("packing", "algorithm", "zeros"), [("awq", "awq", True), ("gptq", "gptq", True), ("gptq", "awq,gptq", False)]
)
def test_awq_and_gptq_hold_what_compressed_tensors_hold(
    full: Path, text: Path, tmp_path: Path, packing: str, algorithm: str, zeros: bool
) -> None:
    arguments = ["--method", "wint4", "--group-size", "32", "--algorithm", algorithm, *["--zeros"] * zeros]
    made = load(make(full, text, tmp_path / packing, *arguments, "--format", packing))
    assert made.spec.stored_format is not None and made.spec.stored_format.packing == packing
    other = load(make(full, text, tmp_path / "other", *arguments))
    # scales are float16 here, float32 there
    assert rms_error(logits(made), logits(other)) < 0.15
    assert 0.01 < rms_error(logits(made), logits(load(full))) < 0.4


def test_feedback_lowers_the_error_of_outputs() -> None:
    torch.manual_seed(0)
    weight, mix = torch.randn(48, 128), torch.randn(128, 128)
    x = torch.randn(1000, 128) @ mix
    grid = int4_grid(weight, 64, False, None, torch.float16)
    feedback = Feedback.of(x.t() @ x, torch.tensor(1000))
    rounded, fed = grid.nearest(torch.arange(128), weight), round_by_feedback(weight, feedback, grid)
    torch.testing.assert_close(grid.nearest(torch.arange(128), fed), fed)
    errors = [((held - weight) @ x.t()).square().mean() for held in (rounded, fed)]
    assert errors[1] < 0.7 * errors[0]


class _HostReads(TorchDispatchMode):
    """Counts the numbers that the host reads from tensors; on a GPU it waits for each."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_gptq_reads_no_number_of_a_column_on_the_host() -> None:
    weight, x = torch.randn(8, 64), torch.randn(128, 64)
    with _HostReads() as reads:
        round_by_feedback(
            weight, Feedback.of(x.t() @ x, torch.tensor(128)), int4_grid(weight, 32, False, None, torch.float32)
        )
    assert reads.count < 4


def test_a_walk_records_what_linears_see(full: Path) -> None:
    decoder = load_recorded(full, torch.device("cpu"), torch.float32)
    windows = torch.randint(96, (3, 32))
    walk = LayerWalk(decoder, windows, batch_windows=2)
    (seen,) = walk.record(decoder.layers[0])[decoder.layers[0].attention.qkv]
    hidden = decoder.embedding(windows.reshape(-1))
    x = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * decoder.layers[0].input_norm.weight
    torch.testing.assert_close(seen.gram, x.t() @ x, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(seen.largest, x.abs().amax(0), rtol=1e-3, atol=1e-3)
    assert seen.num_tokens == 96


def test_head_and_kv_scales(full: Path, text: Path, tmp_path: Path) -> None:
    made = make(full, text, tmp_path, "--method", "wint4", "--lm-head", "--kv-scales")
    tensors = load_file(made / "model.safetensors")
    assert {f"model.layers.{i}.self_attn.{name}_scale" for i in range(2) for name in "kv"} <= set(tensors)
    assert all(1e-4 < tensors[name] < 1 for name in tensors if name.endswith(("k_scale", "v_scale")))
    assert "packed" in load(made).lm_head.weights
    assert (made / "generation_config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--method", "fp8", "--format", "gptq"], "format: gptq checkpoints hold wint4 only, not fp8"),
        (["--method", "wint4", "--format", "awq"], "format: awq checkpoints hold zero-points"),
        (["--method", "w4a8_fp8", "--zeros"], "zeros: only of wint4"),
        (["--method", "fp8", "--algorithm", "awq"], "awq is for wint4, w4a8_fp8, a8w8_fp8_wint4, not fp8"),
        (["--method", "wint4", "--algorithm", "smoothquant"], "smoothquant is for w8a8_int8"),
        (["--method", "wint4", "--algorithm", "hqq"], "algorithm: 'hqq' is not one of awq, gptq, smoothquant"),
        (["--method", "wint4", "--group-size", "48"], "group-size: 48 is not one of -1, 32, 64, 128"),
        (["--method", "wint4", "--group-size", "0"], "group-size: 0 is not one of"),
        (["--method", "fp8", "--group-size", "64"], "group-size: fp8 has no groups; those of wint4, w4a8_fp8, a8w8"),
        (["--method", "fp8", "--kv-scales", "--window-tokens", "65"], "window-tokens: 65; this model takes 2 to 64"),
        (["--method", "fp8", "--kv-scales", "--text", "nothing.txt"], "text: nothing.txt is not a readable UTF-8 file"),
        (
            ["--method", "fp8", "--kv-scales", "--text", "."],
            r"text: \. is not a folder of packed shards and index.json",
        ),
        (["--method", "wint4", "--num-tokens", "4096"], None),
        (["--method", "wint4", "--algorithm", "gptq", "--num-tokens", "4096"], "the text has 2048 tokens, asked for"),
    ],
)
def test_plans_that_cannot_be_made(full: Path, text: Path, tmp_path: Path, arguments: list[str], named: str) -> None:
    if named is None:
        assert (make(full, text, tmp_path, *arguments) / "model.safetensors").exists()  # plain rounding needs no text
        return
    with pytest.raises(ValueError, match=named):
        make(full, text, tmp_path, *arguments)


def test_models_that_cannot_be_quantised_so(full: Path, text: Path, tmp_path: Path) -> None:
    made = make(full, text, tmp_path / "made", "--method", "wint8")
    with pytest.raises(ValueError, match="is quantised already, in wint8"):
        make(made, text, tmp_path / "again", "--method", "wint4")
    narrow = make_full(tmp_path / "narrow", num_key_value_heads=2)
    with pytest.raises(ConfigError, match="k has 64 outputs, not a multiple of 128"):
        make(narrow, text, tmp_path / "blocks", "--method", "block_wise_fp8")
    with pytest.raises(ConfigError, match=r"a8w8_fp8_wint4.*Qwen2ForCausalLM has no experts; accepted: fp8"):
        make(full, text, tmp_path / "mixed", "--method", "a8w8_fp8_wint4")
    for variant, named in (
        ("baichuan", "BaichuanForCausalLM stores layers fused or transformed"),
        ("mistral-seeing", "Mistral3ForConditionalGeneration is stored as a part of another model"),
    ):
        other = make_checkpoint(variant, tmp_path / variant).path
        with pytest.raises(ValueError, match=named):
            make(other, text, tmp_path / "rows", "--method", "wint8")
    assert not any((tmp_path / name).exists() for name in ("again", "blocks", "mixed", "rows"))


def test_a_folder_with_files_is_not_written_into(full: Path, text: Path, tmp_path: Path) -> None:
    """A model's own would be lost, and the index of another checkpoint would hide the new one."""
    (full / TEMPLATE_FOLDER).mkdir()
    (full / TEMPLATE_FOLDER / "tool_use.jinja").write_text("tools")
    made = make(full, text, tmp_path / "made", "--method", "wint8")
    assert (made / TEMPLATE_FOLDER / "tool_use.jinja").read_text() == "tools"
    for output in (full, made, made / "config.json"):
        with pytest.raises(
            ValueError, match=f"output: {re.escape(str(output))} is there already and not an empty folder"
        ):
            make(full, text, output, "--method", "wint4")
    assert load(made).spec.stored_format.method == "wint8"


@pytest.mark.parametrize(
    ("argument", "value"), [("num-tokens", "0"), ("batch-windows", "-1"), ("smoothing", "3"), ("method", "wint5")]
)
def test_arguments_that_say_nothing(argument: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quantize.parse_arguments(["--model", "m", "--output", "o", "--method", "fp8", f"--{argument}", value])
    assert f"argument --{argument}: " in (said := capsys.readouterr().err) and repr(value) in said


def test_one_group_a_row_is_stored_in_every_layout(full: Path, text: Path, tmp_path: Path) -> None:
    found = []
    for layout in ("compressed-tensors", "awq", "gptq"):
        arguments = ["--method", "wint4", "--zeros", "--group-size", "-1", "--format", layout, "--algorithm", ""]
        made = load(make(full, text, tmp_path / layout, *arguments))
        assert made.spec.stored_format is not None and made.spec.stored_format.group_size == 0
        found.append(logits(made))
    # scales are float16 in two of them
    assert rms_error(found[1], found[0]) < 0.15 and torch.equal(found[1], found[2])


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (["fp8"], ["wint4"], r"1\.self_attn\.q_proj\.weight, .* missing .*; of that module it has tensors .*packed"),
        (["wint4"], ["wint4", "--group-size", "64"], r"1\.mlp\.down_proj\.weight_scale has shape \[128, 6\], .* \[128"),
        (["wint8"], ["wint4"], r"1\.mlp\.down_proj\.weight_packed has shape \[128, 48\], .* implies \[128, 96\]"),
        (["wint4"], ["damaged"], r"1\.self_attn\.q_proj\.weight_shape says \[256, 127\], config.json implies"),
        (["wint8"], ["damaged"], r"1\.self_attn\.q_proj\.weight_shape says \[256, 127\]"),
        (["wint4"], ["half"], "model-1.safetensors': not a whole safetensors file"),
    ],
)  # fmt: skip
def test_files_of_two_checkpoints_and_damaged_ones(
    full: Path, text: Path, tmp_path: Path, first: list[str], second: list[str], named: str
) -> None:
    made = make(full, text, tmp_path / "made", "--method", *first)
    tensors = load_file(made / "model.safetensors")
    other = dict(tensors)
    if second == ["damaged"]:
        other["model.layers.1.self_attn.q_proj.weight_shape"] = torch.tensor([256, 127])
    elif second != ["half"]:
        other = load_file(make(full, text, tmp_path / "other", "--method", *second) / "model.safetensors")
    parts = [{n: t for n, t in tensors.items() if ".1." not in n}, {n: t for n, t in other.items() if ".1." in n}]
    weight_map = {}
    for number, part in enumerate(parts):
        save_file(part, made / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{number}.safetensors")
    (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if second == ["half"]:
        whole = (made / "model-1.safetensors").read_bytes()
        (made / "model-1.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=named):
        load(made)


def test_shards(full: Path, tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, shard_bytes=100_000)
    tensors = load_file(full / "model.safetensors")
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close()
    (tmp_path / "config.json").write_text((full / "config.json").read_text())
    shards = list(tmp_path.glob("model-*-of-*.safetensors"))
    assert len(shards) > 3
    assert {file.stat().st_mode for file in shards} == {(tmp_path / "config.json").stat().st_mode}  # for every user
    assert torch.equal(logits(load(tmp_path)), logits(load(full)))


def test_measures_are_those_of_the_definition() -> None:
    torch.manual_seed(0)
    windows, p = torch.randint(7, (2, 5)), torch.randn(2, 5, 7)
    q = p + 0.3 * torch.randn(2, 5, 7)
    same, other = compare(windows, p, p), compare(windows, q, p)
    assert same.divergence == 0 and same.agreement == 1
    log_p, log_q = p[:, :-1].log_softmax(-1), q[:, :-1].log_softmax(-1)
    loss = torch.nn.functional.nll_loss(log_q.flatten(0, 1), windows[:, 1:].flatten())
    assert other.perplexity == pytest.approx(loss.exp().item(), rel=1e-5)
    assert other.divergence == pytest.approx((log_p.exp() * (log_p - log_q)).sum(-1).mean().item(), rel=1e-4)


def test_evaluation_of_weights_and_caches(
    full: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(full, text, tmp_path / "made", "--method", "wint4", "--algorithm", "gptq")
    output = tmp_path / "results"
    arguments = [
        "--model", str(full), "--text", str(text), "--weights", f"none,wint4:64,w4a8_fp8,mine={made},wint4:48",
        "--kv", "auto,int8", "--num-tokens", "256", "--window-tokens", "64", "--batch-windows", "3",
        "--step-tokens", "40", "--device", "cpu", "--output", str(output),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments])
    evaluate.main()
    printed = capsys.readouterr().out
    assert "left out: wint4:48: " in printed and "| none | auto |" in printed
    results = json.loads((output / "evaluation.json").read_text())["results"]
    assert [(result["weights"], result["kv"]) for result in results] == [
        (weights, kv) for weights in ("none", "wint4:64", "w4a8_fp8", "mine") for kv in ("auto", "int8")
    ]
    divergences = [result["measures"]["divergence"] for result in results]
    assert divergences[0] == pytest.approx(0, abs=1e-9) and all(d > 1e-5 for d in divergences[1:])
    assert (output / "evaluation.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "nothing"], "model='nothing': no such folder"),
        (["--text", "nothing.txt"], "text: nothing.txt is not a readable UTF-8 file"),
        (["--window-tokens", "65"], "window-tokens: 65; this model takes 2 to 64"),
        (["--device", "tpu"], "device='tpu': accepted: auto, cpu"),
        (["--weights", "wint4:abc,wint5,other={other}"], "none of --weights could be served"),
    ],
)
def test_evaluations_that_cannot_be_made(
    full: Path,
    text: Path,
    tmp_path: Path,
    arguments: list[str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = make_full(tmp_path / "other", vocab_size=64) if "other" in arguments[1] else tmp_path
    common = ["--model", str(full), "--text", str(text), "--num-tokens", "64", "--window-tokens", "64"]
    given = [argument.format(other=other) for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *common, "--device", "cpu", *given])
    with pytest.raises(SystemExit, match=named):
        evaluate.main()
    if "other" in arguments[1]:
        said = capsys.readouterr().out
        for left_out in (
            "wint4:abc: quantization_group_size='abc': accepted: -1, 32",
            "wint5: ",
            "other: vocab_size=64",
        ):
            assert f"left out: {left_out}" in said


def test_windows_cover_the_text() -> None:
    windows = cut_windows(torch.arange(100), 30, 10)
    assert windows[:, 0].tolist() == [0, 45, 90] and windows.shape == (3, 10)
    assert cut_windows(torch.arange(10), 10, 10).shape == (1, 10)
    with pytest.raises(ValueError, match="has 9 tokens"):
        cut_windows(torch.arange(9), 10, 10)
