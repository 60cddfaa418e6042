"""Builds and loads the decoder of a ModelConfig: chooses device and dtype, builds layers, loads weights."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.attention import ATTENTION_BACKENDS, INVARIANT, INVARIANT_LATENT, SplitKVFp8Attention
from slipstream.nn.attention.latent import LatentBackend
from slipstream.nn.checkpoint_path import resolve_checkpoint
from slipstream.nn.decoder import Decoder
from slipstream.nn.key_means import FP8 as FP8_PREFILL
from slipstream.nn.key_means import (
    attend_in_fp8,
    check_fp8_prefill,
    needs_key_means,
    read_key_means,
    round_queries,
    rounding_refusal,
    zero_means,
)
from slipstream.nn.layer_context import LayerContext
from slipstream.nn.layer_spec import ExpertsSpec
from slipstream.nn.lora import LoraRows, LoraTargets
from slipstream.nn.models.family import FAMILIES
from slipstream.nn.parallel import FIELD, SINGLE, Parallel
from slipstream.nn.quant import Methods, choose_methods
from slipstream.nn.read_spec import read_spec
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.weights import (
    check_checkpoint,
    check_same_on_nodes,
    draw_dummies,
    load_checkpoint,
    tensor_without_numbers,
)

META = torch.device("meta")
LEAST_CAPABILITY = (8, 0)  # of a GPU: with bfloat16, and shared memory for the kernels' tiles
PLANNED_ATTENTION = "paged"  # holds nothing
_FIELDS_OF_SIZES = ("quantization", "quantization_group_size", FIELD)  # of errors about a layer's sizes
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

log = logging.getLogger(__name__)


def resolve_device(device: str) -> torch.device:
    """As `find_device`; raises ConfigError for a GPU that kernels do not serve as well."""
    found = find_device(device)
    if found.type == "cuda":
        require_capability(device, found.index)
    return found


def find_device(device: str) -> torch.device:
    """ "auto": the first GPU if there is one, else the CPU. Raises ConfigError for a missing device."""
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ConfigError("device", device, "accepted: auto, cpu, cuda, cuda:<index>") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError("device", device, "accepted: auto, cpu, cuda, cuda:<index>")
    if chosen.type == "cpu":
        return chosen
    index = chosen.index or 0
    if index >= torch.cuda.device_count():
        raise ConfigError("device", device, f"this machine has {torch.cuda.device_count()} usable GPUs")
    return torch.device("cuda", index)  # torch.cuda.set_device wants an index


def require_capability(device: str, index: int) -> None:
    """Raise ConfigError if the GPU of that number is too old. device: the setting that led to it."""
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        found, needed = (".".join(map(str, version)) for version in (capability, LEAST_CAPABILITY))
        reason = f"cuda:{index} has compute capability {found}, kernels need {needed}; accepted: cpu, or another GPU"
        raise ConfigError("device", device, reason)


def resolve_dtype(dtype: str, spec: DecoderSpec, device: torch.device) -> torch.dtype:
    """ "auto": the checkpoint's dtype on a GPU, float32 on a CPU.

    Measured on one Zen core, Llama of 21M parameters, a decode step of 64 requests | a prompt of 256 tokens: fp32
    94 | 120 ms; bf16 with AVX512-BF16 62 | 79 ms, with AVX512 only 138 | 299 ms, with AVX2 449 | 1050 ms. In fp32 a
    request's logits agree to 1e-6 in any batch, so that greedy text does not depend on the batch.
    """
    if dtype == "auto":
        return spec.dtype if device.type == "cuda" else torch.float32
    if dtype not in _DTYPES:
        raise ConfigError("dtype", dtype, f"accepted: auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def load_model(
    config: ModelConfig,
    spec: DecoderSpec | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
    parallel: Parallel = SINGLE,
) -> Decoder:
    """The decoder of a checkpoint with its weights, ready for `forward`.

    spec, device, dtype: None: resolved from the config. kv_dtype: of its caches; None is dtype.
    parallel: the rank whose part is loaded; the spec is that of the whole model.
    Raises ConfigError before weights are read if the checkpoint, one of its fields or the configuration is unsupported.
    """
    checkpoint_dir = resolve_checkpoint(config.model)
    spec = spec or read_spec(checkpoint_dir, config.rope_scaling)
    device = device or resolve_device(config.device)
    dtype = dtype or resolve_dtype(config.dtype, spec, device)
    decoder = _build(config, spec, device, dtype, kv_dtype, parallel=parallel)
    start = time.perf_counter()
    if config.load_format == "dummy":
        draw_dummies(decoder, config.seed)
    else:
        check_same_on_nodes(checkpoint_dir, parallel)
        load_checkpoint(decoder, checkpoint_dir)
    if needs_key_means(config, kv_dtype):
        is_dummy = config.load_format == "dummy"
        attend_in_fp8(decoder, zero_means(spec) if is_dummy else read_key_means(checkpoint_dir, spec))
    elif config.prefill_attention_dtype == FP8_PREFILL:
        attend_in_fp8(decoder, None)
    log.info(
        "%s: %.1f M parameters in %s on %s, loaded in %.2f s",
        spec.architecture,
        spec.num_parameters / 1e6,
        str(dtype).removeprefix("torch."),
        device,
        time.perf_counter() - start,
    )
    return decoder


def refuse_without_numbers(config: ModelConfig, dtype: torch.dtype) -> ConfigError:
    """The error for a model whose logits are not finite: names the faulty tensor, or else the dtype."""
    found = "" if config.load_format == "dummy" else tensor_without_numbers(resolve_checkpoint(config.model))
    reason = f"tensor {found} holds NaN or infinity" if found else f"too large for {str(dtype).removeprefix('torch.')}"
    return ConfigError("model", config.model, f"computes NaN or infinity: {reason}")


def weight_bytes(config: ModelConfig, spec: DecoderSpec, dtype: torch.dtype, parallel: Parallel = SINGLE) -> int:
    """Bytes of the loaded weights of a rank. dtype: of activations. Raises ConfigError like `load_model`."""
    return sum(tensor.nbytes for tensor in planned_model(config, spec, dtype, META, parallel).tensors())


def planned_model(
    config: ModelConfig,
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    parallel: Parallel = SINGLE,
) -> Decoder:
    """The decoder on the meta device: has every tensor that it will hold on `device`, but takes no memory.

    Raises ConfigError as `load_model`; it names tensor_parallel_size if fewer ranks would hold the layers.
    """
    _check_parallel(spec, parallel)
    context = _context(config, choose_methods(config, spec), META, dtype, parallel, device)
    try:
        return _planned(spec, context)
    except ConfigError as error:
        if parallel.size == 1 or error.field not in _FIELDS_OF_SIZES:
            raise
        fewer = range(1 + parallel.splits_experts, parallel.size)
        sizes = [str(size) for size in fewer if _is_held(spec, context, size)]
        if not sizes:
            raise
        reason = error.accepted if error.field == FIELD else f"a rank's part of the model: {error}"
        raise ConfigError(FIELD, parallel.size, f"{reason}; accepted {FIELD}: {', '.join(sizes)}") from error


def _planned(spec: DecoderSpec, context: LayerContext) -> Decoder:
    return Decoder(spec, context, ATTENTION_BACKENDS.get(PLANNED_ATTENTION)(spec), num_positions=1)


def _is_held(spec: DecoderSpec, context: LayerContext, size: int) -> bool:
    """Whether so many ranks share the layers; the first and the last may have parts of different sizes."""
    if size * context.parallel.num_stages % context.parallel.num_nodes:
        return False
    try:
        for rank in (0, size - 1):
            _planned(spec, replace(context, parallel=replace(context.parallel, rank=rank, size=size)))
    except ConfigError:
        return False
    return True


def check_model(
    config: ModelConfig,
    spec: DecoderSpec,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    parallel: Parallel = SINGLE,
) -> None:
    """Raises what `load_model` would raise; reads only the headers of the files and allocates no weights."""
    if parallel.size > 1:
        planned_model(config, spec, dtype, device, parallel)  # its error names the number of ranks, where that is wrong
    decoder = _build(config, spec, device, dtype, kv_dtype, META, parallel)
    if config.load_format not in ("dummy", "null"):
        check_checkpoint(decoder, resolve_checkpoint(config.model))
        if needs_key_means(config, kv_dtype):
            read_key_means(resolve_checkpoint(config.model), spec)


def _wanted_attention(config: ModelConfig, spec: DecoderSpec) -> str | None:
    """The requested backend; None: the best that fits. Raises ConfigError if it conflicts with `deterministic`."""
    if not config.deterministic:
        return config.attention_backend or None
    is_latent = LatentBackend.supports(spec, META, spec.dtype) is None
    wanted = INVARIANT_LATENT if is_latent else INVARIANT
    if config.attention_backend not in ("", wanted):
        raise ConfigError("attention_backend", config.attention_backend, f"deterministic: accepted: {wanted}, or empty")
    return wanted


def _build(
    config: ModelConfig,
    spec: DecoderSpec,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    place: torch.device | None = None,
    parallel: Parallel = SINGLE,
) -> Decoder:
    """place: the device of the parameters, if it differs from the device that implementations are chosen for."""
    if config.max_model_len > spec.max_model_len:
        raise ConfigError("max_model_len", config.max_model_len, f"the checkpoint serves at most {spec.max_model_len}")
    _check_parallel(spec, parallel)
    methods = choose_methods(config, spec)
    for method in (methods.linears, methods.experts):
        reason = method.supports(device, dtype)
        if reason is not None:
            raise ConfigError("quantization", methods.name, f"cannot serve here: {reason}")
    check_fp8_prefill(config, spec, device, kv_dtype)
    own = spec.of_rank(parallel)
    backend_name, backend = ATTENTION_BACKENDS.select(
        lambda entry: rounding_refusal(entry, config, device, kv_dtype) or entry.supports(own, device, dtype, kv_dtype),
        _wanted_attention(config, own),
    )
    log.info("quantization of linear layers: %s; attention: %s", methods.name, backend_name)
    context = _context(config, methods, place or device, dtype, parallel, device)
    decoder = Decoder(spec, context, backend(own), config.max_model_len or spec.max_model_len)
    if backend is SplitKVFp8Attention:
        round_queries(decoder)
    return decoder


def _context(
    config: ModelConfig,
    methods: Methods,
    place: torch.device,
    dtype: torch.dtype,
    parallel: Parallel,
    device: torch.device,
) -> LayerContext:
    """place: of the parameters; device: that implementations are chosen for."""
    return LayerContext(
        place, dtype, methods.linears, methods.head, parallel, device, methods.experts, _lora(config), methods.plain
    )


def lora_targets(decoder: Decoder) -> LoraTargets:
    """What adapters may change in a decoder that was built with enable_lora."""
    return LoraTargets(decoder, FAMILIES.get(decoder.spec.architecture).names_of(decoder.spec))


def _lora(config: ModelConfig) -> LoraRows | None:
    return LoraRows(config.max_loras, config.max_lora_rank) if config.enable_lora else None


def _check_parallel(spec: DecoderSpec, parallel: Parallel) -> None:
    """Refuse what ranks cannot share. Features that do not divide evenly are refused where they are divided."""
    formats = (spec.stored_format, spec.expert_format)
    if parallel.size > 1 and any(stored is not None and stored.act_order for stored in formats):
        reason = "the checkpoint's input features are in an order of their own (desc_act); accepted: 1"
        raise ConfigError(FIELD, parallel.size, reason)
    if parallel.splits_experts and not any(isinstance(layer.mlp, ExpertsSpec) for layer in spec.layers):
        raise ConfigError("expert_parallel", True, "the model has no experts; accepted: false")
