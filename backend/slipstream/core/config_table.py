"""Every parameter of config.pbtxt and of `slipstream.LLM`: its name, where its value goes, what it means.

A table and nothing else: config_parse.py reads by it, build/make_docs.py writes docs/configuration.md from it. A
parameter's default is that of the dataclass field it sets (config.py).
"""

# ruff: noqa: E501  (one row, one line)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slipstream.core.config import (
    DTYPES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    OVERLAP_MODES,
    QUANTIZATIONS,
    SCHEDULER_POLICIES,
    TASKS,
)


@dataclass(frozen=True)
class Parameter:
    """name: in config.pbtxt. path: "section.field" of EngineConfig. aliases: other backends' names of the same thing.

    accepted: the words accepted, or "" for any; is_good: a check of the typed value, described by `limits`.
    """

    name: str
    path: str
    doc: str
    aliases: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    limits: str = ""
    is_good: Callable[[Any], bool] = lambda value: True


def _at_least(low: int) -> dict[str, Any]:
    return {"limits": f"an integer >= {low}", "is_good": lambda value: value >= low}


_POWER_OF_TWO: dict[str, Any] = {
    "limits": "a power of two from 1 to 1024",
    "is_good": lambda v: 1 <= v <= 1024 and v & (v - 1) == 0,
}
_FRACTION: dict[str, Any] = {"limits": "a number in (0, 1]", "is_good": lambda value: 0.0 < value <= 1.0}


def _is_graph_sizes(value: str) -> bool:
    sizes = value.split(",")
    return value in ("auto", "off") or all(size.strip().isdecimal() and int(size) >= 1 for size in sizes)


PARAMETERS: tuple[Parameter, ...] = (
    Parameter("task", "task", "What the model does: text generation, or TensorRT-LLM's `preprocessing` / `postprocessing`.", accepted=TASKS),
    Parameter("model", "model.model", "The checkpoint: a folder (relative to the model's folder) or a Hugging Face id. Without it: the version folder, if that holds one.", ("gpt_model_path", "engine_dir")),
    Parameter("tokenizer", "model.tokenizer", "A folder with tokenizer.json, the file, or a hub id; the checkpoint's when empty.", ("tokenizer_dir",)),
    Parameter("dtype", "model.dtype", "Type of weights and activations; `auto` is the checkpoint's.", accepted=DTYPES),
    Parameter("load_format", "model.load_format", "`dummy`: random weights; `null`: no model at all, every step emits a fixed token.", accepted=LOAD_FORMATS),
    Parameter("max_model_len", "model.max_model_len", "Longest sequence, prompt and output together; 0 is the checkpoint's.", ("max_seq_len",), **_at_least(0)),
    Parameter("device", "model.device", "`auto`, `cpu`, `cuda` or `cuda:<index>`.", limits="auto, cpu, cuda or cuda:<index>", is_good=lambda v: str(v).split(":")[0] in ("auto", "cpu", "cuda")),
    Parameter("quantization", "model.quantization", "How linear layers are held and multiplied; `auto` is as the checkpoint stores them. `fp8`: scales per output channel and token; `block_wise_fp8`: per 128 x 128 weights and 128 activations. An unquantised checkpoint is quantised as it is loaded.", accepted=QUANTIZATIONS),
    Parameter("attention_backend", "model.attention_backend", "Attention implementation; empty is the best that fits."),
    Parameter("cuda_graphs", "model.cuda_graphs", "Decode steps captured at start: `auto`, `off`, or the numbers of requests to capture for, like `1,2,4,8`.", limits="auto, off, or integers >= 1 with commas", is_good=_is_graph_sizes),
    Parameter("seed", "model.seed", "Seed of `dummy` weights. A request that gives none draws its own.", **_at_least(0)),
    Parameter("block_size", "cache.block_size", "Tokens per block of the KV cache.", ("tokens_per_block",), **_POWER_OF_TWO),
    Parameter("num_blocks", "cache.num_blocks", "Blocks of the KV cache; 0 is as many as fit.", **_at_least(0)),
    Parameter("memory_fraction", "cache.memory_fraction", "Share of free GPU memory, after the weights, for the KV cache.", ("kv_cache_free_gpu_mem_fraction", "gpu_memory_utilization"), **_FRACTION),
    Parameter("memory_bytes", "cache.memory_bytes", "Bytes for the KV cache instead of a share; 0 is unset.", **_at_least(0)),
    Parameter("kv_cache_dtype", "cache.dtype", "Type of keys and values; `auto` is `dtype`.", accepted=KV_CACHE_DTYPES),
    Parameter("enable_prefix_caching", "cache.enable_prefix_caching", "Reuse the cache of a prompt's beginning that was seen before.", ("enable_kv_cache_reuse",)),
    Parameter("max_num_batched_tokens", "scheduler.max_num_batched_tokens", "Token budget of one step.", ("max_num_tokens",), **_at_least(1)),
    Parameter("max_num_seqs", "scheduler.max_num_seqs", "Most sequences that run at once.", **_at_least(1)),
    Parameter("scheduler_policy", "scheduler.policy", "`max_utilization` may preempt; `guaranteed_no_evict` admits what surely fits.", ("batch_scheduler_policy",), SCHEDULER_POLICIES),
    Parameter("max_waiting_requests", "scheduler.max_waiting_requests", "Requests in the queue above which new ones get UNAVAILABLE.", ("max_queue_size",), **_at_least(0)),
    Parameter("enable_chunked_prefill", "scheduler.enable_chunked_prefill", "Spread a long prompt over several steps.", ("enable_chunked_context",)),
    Parameter("default_max_queue_ms", "scheduler.default_max_queue_ms", "A request that waits longer ends with `timeout`; 0 waits without limit.", **_at_least(0)),
    Parameter("overlap_scheduling", "scheduler.overlap_scheduling", "Schedule a step while the one before it runs; `auto` is on for GPUs.", accepted=OVERLAP_MODES),
    Parameter("default_max_tokens", "serving.default_max_tokens", "`max_tokens` of a request that gives none.", **_at_least(1)),
    Parameter("stream_interval", "serving.stream_interval", "Tokens per streamed response of a request that does not say; the first leaves at once.", **_at_least(1)),
    Parameter("exclude_input_in_output", "serving.exclude_input_in_output", "Whether the prompt is left out of a response; unset: left out when streaming, echoed otherwise."),
    Parameter("drain_timeout_s", "serving.drain_timeout_s", "Seconds that running requests have to finish at unload.", limits="a number >= 0", is_good=lambda value: value >= 0.0),
    Parameter("add_special_tokens", "serving.add_special_tokens", "Whether the tokenizer puts its special tokens around a prompt."),
    Parameter("skip_special_tokens", "serving.skip_special_tokens", "Whether special tokens are left out of text."),
    Parameter("ignored_request_parameters", "serving.ignored_request_parameters", "Patterns such as `x-*,traceparent`: request parameters to pass over (headers that Triton forwards) instead of refusing them."),
)  # fmt: skip

_PERIOD = "remove it: Slipstream has no polling loops to tune"
_ONE_PROCESS = "remove it: set `device` instead"
_NO_ENCODER = "remove it: encoder-decoder models are not served"
_NO_LORA = "remove it: LoRA adapters are not served"
_NO_BEAMS = "remove it: there is no beam search"
_NO_SPECULATION = "remove it: speculative decoding is not configured here"
_STATS = "remove it: statistics are at Triton's /metrics"

# TensorRT-LLM parameters that mean nothing here -> (values that may stay, what to do about the others).
FOREIGN: dict[str, tuple[tuple[str, ...], str]] = {
    "gpt_model_type": (("inflight_fused_batching", "inflight_batching"), "remove it: batching is always in flight"),
    "batching_strategy": (("inflight_fused_batching", "inflight_batching"), "remove it: batching is always in flight"),
    "max_beam_width": (("1",), _NO_BEAMS),
    "decoding_mode": (("top_k", "top_p", "top_k_top_p", "auto"), "remove it: requests choose top_k and top_p"),
    "encoder_model_path": (("",), _NO_ENCODER),
    "cross_kv_cache_fraction": (("",), _NO_ENCODER),
    "multimodal_model_path": (("",), "remove it: this is a text model"),
    "kv_cache_host_memory_bytes": (("", "0"), "remove it: the cache is not offloaded to host memory"),
    "kv_cache_onboard_blocks": (("",), "remove it: the cache is not offloaded to host memory"),
    "max_attention_window_size": (
        ("",),
        "remove it: the window is the checkpoint's; use `max_model_len` to bound sequences",
    ),
    "sink_token_length": (("", "0"), "remove it: attention sinks are not served"),
    "normalize_log_probs": (("", "true", "false"), "remove it: log-probabilities are sums, not means"),
    "gpu_device_ids": (("",), _ONE_PROCESS),
    "participant_ids": (("",), _ONE_PROCESS),
    "num_nodes": (("", "1"), _ONE_PROCESS),
    "executor_worker_path": (("",), "remove it: the backend starts its own engine process"),
    "worker_path": (("",), "remove it: the backend starts its own engine process"),
    "cancellation_check_period_ms": (("",), "remove it: cancels are looked at every step"),
    "stats_check_period_ms": (("",), _STATS),
    "iter_stats_max_iterations": (("",), _STATS),
    "request_stats_max_iterations": (("",), _STATS),
    "recv_poll_period_ms": (("",), _PERIOD),
    "lora_cache_optimal_adapter_size": (("",), _NO_LORA),
    "lora_cache_max_adapter_size": (("",), _NO_LORA),
    "lora_cache_gpu_memory_fraction": (("",), _NO_LORA),
    "lora_cache_host_memory_bytes": (("",), _NO_LORA),
    "lora_prefetch_dir": (("",), _NO_LORA),
    "medusa_choices": (("",), _NO_SPECULATION),
    "eagle_choices": (("",), _NO_SPECULATION),
    "lookahead_window_size": (("",), _NO_SPECULATION),
    "lookahead_ngram_size": (("",), _NO_SPECULATION),
    "lookahead_verification_set_size": (("",), _NO_SPECULATION),
    "speculative_decoding_fast_logits": (("", "0", "false"), _NO_SPECULATION),
    "multi_block_mode": (("", "true", "1"), "remove it: long sequences are always split over the GPU"),
    "enable_context_fmha_fp32_acc": (("", "true", "1"), "remove it: attention always accumulates in fp32"),
    "cuda_graph_mode": (("",), "remove it: the engine decides"),
    "cuda_graph_cache_size": (("",), "remove it: the engine decides"),
    "gpu_weights_percent": (("", "1", "1.0"), "remove it: weights are never streamed from host memory"),
    "guided_decoding_backend": (("", "xgrammar"), "remove it: xgrammar is built in"),
    "xgrammar_tokenizer_info_path": (("",), "remove it: the tokenizer is read from the checkpoint"),
    "FORCE_CPU_ONLY_INPUT_TENSORS": (("no", "yes"), "remove it: it is for Python models"),
    "REPORT_CUSTOM_METRICS": (("true", "yes"), "remove it: metrics are always reported"),
    "ENABLE_VLLM_HEALTH_CHECK": (("true", "yes"), "remove it: readiness always tells the engine's state"),
}
