"""Every parameter of config.pbtxt and of `slipstream.LLM`: its name, where its value goes, what it means.

A table and nothing else: config_parse.py reads by it, build/make_docs.py writes docs/configuration.md from it. A
parameter's default is that of the dataclass field it sets (config.py). The parameters of a speculation method come
from its row in draft_methods.py.
"""

# ruff: noqa: E501  (one row, one line)
from __future__ import annotations

from typing import Any

from slipstream.core.config import (
    ACCEPTANCES,
    DTYPES,
    GROUP_SIZES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    NO_SPECULATION,
    OVERLAP_MODES,
    SCHEDULER_POLICIES,
    TASKS,
    THROTTLES,
)
from slipstream.core.draft_methods import DRAFT_METHODS
from slipstream.core.errors import RequestError
from slipstream.core.parameter import FRACTION, Parameter, at_least, between
from slipstream.core.settings import BY_NAME


def _default_of(setting: str) -> dict[str, Any]:
    """A default for requests that do not say: the bounds are the request setting's own."""
    kind = BY_NAME[setting].kind

    def is_good(value: Any) -> bool:
        try:
            kind.check(setting, value)
        except RequestError:
            return False
        return True

    return {"limits": kind.accepted, "is_good": is_good}


_POWER_OF_TWO: dict[str, Any] = {
    "limits": "a power of two from 1 to 1024",
    "is_good": lambda v: 1 <= v <= 1024 and v & (v - 1) == 0,
}
_MOST_DRAFTS = 63  # core/drafts.py
_METHODS = DRAFT_METHODS.names()
_LISTED = ", ".join(f"`{name}`" for name in _METHODS)


def _are_methods(value: str) -> bool:
    names = [name.strip() for name in value.split(",")]
    return len(set(names)) == len(names) and all(name in (*_METHODS, NO_SPECULATION) for name in names)


def _is_graph_sizes(value: str) -> bool:
    sizes = value.split(",")
    return value in ("auto", "off") or all(size.strip().isdecimal() and int(size) >= 1 for size in sizes)


PARAMETERS: tuple[Parameter, ...] = (
    Parameter("task", "task", "What the model does: text generation, or TensorRT-LLM's `preprocessing` / `postprocessing`.", accepted=TASKS),
    Parameter("model", "model.model", "The checkpoint: a folder (relative to the model's folder), a GGUF file or a Hugging Face id. Without it: the version folder, if that holds one.", ("gpt_model_path", "engine_dir")),
    Parameter("tokenizer", "model.tokenizer", "A folder with tokenizer.json, the file, a GGUF file or a hub id; the checkpoint's when empty.", ("tokenizer_dir",)),
    Parameter("dtype", "model.dtype", "Type of weights and activations; `auto` is the checkpoint's.", accepted=DTYPES),
    Parameter("load_format", "model.load_format", "`dummy`: random weights; `null`: no model at all, every step emits a fixed token.", accepted=LOAD_FORMATS),
    Parameter("max_model_len", "model.max_model_len", "Longest sequence, prompt and output together; 0 is the checkpoint's.", ("max_seq_len",), **at_least(0)),
    Parameter("device", "model.device", "`auto`, `cpu`, `cuda` or `cuda:<index>`.", limits="auto, cpu, cuda or cuda:<index>", is_good=lambda v: str(v).split(":")[0] in ("auto", "cpu", "cuda")),
    Parameter("quantization", "model.quantization", "How linear layers are held and multiplied; `auto` is as the checkpoint stores them. `fp8`: scales per output channel and token; `block_wise_fp8`: per 128 x 128 weights and 128 activations; `wint8`, `wint4`: integer weights, 16-bit activations; `w8a8_int8`, `w4a8_fp8`: the same weights, 8-bit activations; `a8w8_fp8_wint4`: `w4a8_fp8` in the experts of MoE layers, `fp8` elsewhere. An unquantised checkpoint is quantised as it is loaded.", limits="a registered method"),
    Parameter("quantization_group_size", "model.quantization_group_size", "Input features that share a scale of 4-bit weights: 32, 64, 128, or -1 for all of a row; 0 is the checkpoint's, or 128.", limits=f"one of {', '.join(map(str, GROUP_SIZES))}", is_good=lambda value: value in GROUP_SIZES),
    Parameter("quantize_lm_head", "model.quantize_lm_head", "Quantise the output head by the same method, also one that the checkpoint leaves alone or ties to the embedding."),
    Parameter("attention_backend", "model.attention_backend", "Attention implementation: `split_kv_fp8` (for an FP8 cache: queries of long prompts are rounded to e4m3, too), `split_kv`, `paged`; empty is the first of these that fits. Beside the first two, decodes of one or two requests with `fp8` or `wint4` weights run all layers in one launch where the model's shapes allow it (heads of 128, at most 4096 hidden features); the log of a start says whether, and why not."),
    Parameter("cuda_graphs", "model.cuda_graphs", "Steps captured at start as CUDA graphs: `auto`, `off`, or the numbers of requests to capture for, like `1,2,4,8`. Steps that verify drafts or hold prompts of up to 64 tokens are captured for the same numbers, up to 512 tokens.", limits="auto, off, or integers >= 1 with commas", is_good=_is_graph_sizes),
    Parameter("deterministic", "model.deterministic", "A request's tokens depend on nothing else in the batch, nor on chunks, prefix reuse, speculation or CUDA graphs: every row is multiplied and attended alike, which is slower (docs/speculation.md). For `quantization` `none`, `fp8` and `wint8`, `float32` on a CPU, and `speculative_acceptance` `exact`."),
    Parameter("seed", "model.seed", "Seed of `dummy` weights. A request that gives none draws its own.", **at_least(0)),
    Parameter("block_size", "cache.block_size", "Tokens per block of the KV cache.", ("tokens_per_block",), **_POWER_OF_TWO),
    Parameter("num_blocks", "cache.num_blocks", "Blocks of the KV cache; 0 is as many as fit.", **at_least(0)),
    Parameter("memory_fraction", "cache.memory_fraction", "Share of free GPU memory, after the weights, for the KV cache.", ("kv_cache_free_gpu_mem_fraction", "gpu_memory_utilization"), **FRACTION),
    Parameter("memory_bytes", "cache.memory_bytes", "Bytes for the KV cache instead of a share; 0 is unset.", **at_least(0)),
    Parameter("kv_cache_dtype", "cache.dtype", "Type of keys and values; `auto` is `dtype`, a float type must be it. `fp8_e4m3`: half the bytes of a 16-bit type, with the checkpoint's scales if it has some; `int8`, `int4`: a scale per token and head.", ("kv_cache_quant_algo",), KV_CACHE_DTYPES, synonyms={"fp8": "fp8_e4m3", "FP8": "fp8_e4m3", "INT8": "int8"}),
    Parameter("enable_prefix_caching", "cache.enable_prefix_caching", "Reuse the cache of a prompt's beginning that was seen before.", ("enable_kv_cache_reuse",)),
    Parameter("kv_cache_host_memory_bytes", "cache.host_memory_bytes", "Host memory for blocks that the KV cache gives up: prefixes gone cold and preempted requests come back by a copy instead of being computed again. Needs `enable_prefix_caching`; 0 is off.", **at_least(0)),
    Parameter("max_num_batched_tokens", "scheduler.max_num_batched_tokens", "Token budget of one step. 8192 to 16384 prefill 1 to 4 % faster on an H200; each step that decodes share with prompts takes longer.", ("max_num_tokens",), **at_least(1)),
    Parameter("max_num_seqs", "scheduler.max_num_seqs", "Most sequences that run at once.", **at_least(1)),
    Parameter("scheduler_policy", "scheduler.policy", "`max_utilization` may preempt; `guaranteed_no_evict` admits what surely fits.", ("batch_scheduler_policy",), SCHEDULER_POLICIES),
    Parameter("max_waiting_requests", "scheduler.max_waiting_requests", "Requests in the queue above which new ones get UNAVAILABLE.", ("max_queue_size",), **at_least(0)),
    Parameter("enable_chunked_prefill", "scheduler.enable_chunked_prefill", "Spread a long prompt over several steps.", ("enable_chunked_context",)),
    Parameter("default_max_queue_ms", "scheduler.default_max_queue_ms", "A request that waits longer ends with `timeout`; 0 waits without limit.", **at_least(0)),
    Parameter("priority_aging_s", "scheduler.priority_aging_s", "Seconds in which a waiting request gains one level of priority: it is overtaken only by requests that arrive less than (its `priority` - theirs) times as long after it, at most 200 times. 0: strictly by `priority`, so that the lowest may never be served.", limits="a number from 0 to 86400", is_good=lambda value: 0.0 <= value <= 86400.0),
    Parameter("overlap_scheduling", "scheduler.overlap_scheduling", "Schedule a step while the one before it runs; `auto` is on for GPUs.", accepted=OVERLAP_MODES),
    Parameter("speculative_method", "speculation.methods", f"Ways to draft that are loaded, with commas: {_LISTED}. The first serves requests that name none; `none` or empty: no speculation.", limits=f"names of {', '.join(_METHODS)} with commas, or {NO_SPECULATION}", is_good=_are_methods),
    Parameter("num_draft_tokens", "speculation.num_draft_tokens", "Drafts per step of a request that does not say, and the most that one may ask for; 0 is the method's own number.", ("num_speculative_tokens", "speculate_max_draft_token_num"), **between(0, _MOST_DRAFTS)),
    Parameter("speculative_acceptance", "speculation.acceptance", "How drafts are judged: `exact` (same text as without drafts, seeds included) and `rejection` (same distribution) lose nothing; `typical` (Medusa) and `top_p_window` (Paddle) accept more and change the distribution.", accepted=ACCEPTANCES),
    Parameter("speculation_throttle", "speculation.throttle", "`auto`: fewer or no drafts while so many requests run that drafts do not pay; `off`: always draft.", accepted=THROTTLES),
    Parameter("free_tokens", "speculation.free_tokens", "Most rows of a step that has drafts; 0: on a GPU as many as pay, by what steps were measured to take at start (docs/speculation.md), on a CPU no limit; -1: none, whatever is known of the GPU.", **at_least(-1)),
    *(parameter for method in DRAFT_METHODS.values() for parameter in method.parameters),
    Parameter("typical_threshold", "speculation.typical_threshold", "For `typical`: probability above which a draft is always accepted.", ("posterior_threshold",), **FRACTION),
    Parameter("typical_alpha", "speculation.typical_alpha", "For `typical`: factor of exp(-entropy) above which it is.", ("posterior_alpha",), **FRACTION),
    Parameter("acceptance_top_p", "speculation.acceptance_top_p", "For `top_p_window`: total probability of the tokens accepted, where a request sets no top_p.", **FRACTION),
    Parameter("acceptance_window", "speculation.acceptance_window", "For `top_p_window`: likeliest tokens in a row after a second-likeliest one that make it accepted.", ("speculate_verify_window",), **at_least(1)),
    Parameter("guided_max_regex_chars", "guided.max_regex_chars", "Characters of a regular expression that guides decoding; of a list of choices all together.", **at_least(1)),
    Parameter("guided_max_grammar_bytes", "guided.max_grammar_bytes", "Bytes of an EBNF grammar.", **at_least(1)),
    Parameter("guided_max_schema_bytes", "guided.max_schema_bytes", "Bytes of a JSON schema.", **at_least(1)),
    Parameter("guided_max_properties", "guided.max_properties", "Properties of a JSON schema, those of all its objects together.", **at_least(1)),
    Parameter("guided_max_depth", "guided.max_depth", "Levels of nesting in a JSON schema, and of parentheses in a regular expression or an EBNF grammar.", **at_least(1)),
    Parameter("guided_max_repeat", "guided.max_repeat", "The largest `minLength`, `maxLength`, `minItems` and their like of a JSON schema, and number in `{m,n}` of a regular expression or an EBNF grammar.", **at_least(1)),
    Parameter("guided_max_compile_ms", "guided.max_compile_ms", "CPU time of compiling a grammar, in a process of its own; the request ends with INVALID_ARG above it.", **at_least(1)),
    Parameter("guided_max_step_ms", "guided.max_step_ms", "Time that the grammar of one request may take for one token; above it the request ends with INVALID_ARG. Other requests do not wait for it.", **at_least(1)),
    Parameter("guided_max_request_ms", "guided.max_request_ms", "CPU time that the grammar of one request may take for all its tokens.", **at_least(1)),
    Parameter("guided_memory_bytes", "guided.memory_bytes", "Memory that compiling a grammar, and matching all of them, may take beside what their process needs by itself.", **at_least(67108864)),
    Parameter("guided_cache_bytes", "guided.cache_bytes", "Compiled grammars that are kept; those in use are kept in any case.", **at_least(0)),
    Parameter("default_max_tokens", "serving.default_max_tokens", "`max_tokens` of a request that gives none.", **_default_of("max_tokens")),
    Parameter("default_temperature", "serving.default_temperature", "Temperature of a request that gives none, nor `top_k` or `top_p`. 0 (greedy) is what TensorRT-LLM's clients are used to.", **_default_of("temperature")),
    Parameter("stream_interval", "serving.stream_interval", "Tokens per streamed response of a request that does not say; the first leaves at once.", **_default_of("stream_interval")),
    Parameter("max_response_entries", "serving.max_response_entries", "Most tokens that a request may gather for one response, each counted once and once more per alternative that `logprobs` asks for: n x max_tokens x (1 + logprobs), plus the prompt's with `prompt_logprobs` or echoed. When streaming, `stream_interval` stands for max_tokens. An entry with log-probabilities takes about 100 bytes.", **at_least(1)),
    Parameter("stop_by_request_id", "serving.stop_by_request_id", "Whether a request with `stop: true` ends the running request of its id, as with TensorRT-LLM. Whoever knows or guesses an id can then end that request, so clients must choose ids that cannot be guessed. Off, such a request is refused; cancelling a gRPC stream or closing an HTTP connection always works."),
    Parameter("exclude_input_in_output", "serving.exclude_input_in_output", "Whether the prompt is left out of a response; unset: left out when streaming, echoed otherwise."),
    Parameter("drain_timeout_s", "serving.drain_timeout_s", "Seconds that running requests have to finish at unload.", limits="a number >= 0", is_good=lambda value: value >= 0.0),
    Parameter("max_tokenizing_bytes", "serving.max_tokenizing_bytes", "Bytes of the requests above 8192 bytes that wait to be tokenised; above it, or above `max_waiting_requests` of them, new ones get UNAVAILABLE.", **at_least(1)),
    Parameter("add_special_tokens", "serving.add_special_tokens", "Whether the tokenizer puts its special tokens around a prompt."),
    Parameter("skip_special_tokens", "serving.skip_special_tokens", "Whether special tokens are left out of text."),
    Parameter("ignored_request_parameters", "serving.ignored_request_parameters", "Patterns such as `x-*,traceparent`: request parameters to pass over (headers that Triton forwards) instead of refusing them."),
)  # fmt: skip

_PERIOD = "remove it: Slipstream has no polling loops to tune"
_ONE_PROCESS = "remove it: set `device` instead"
_NO_ENCODER = "remove it: encoder-decoder models are not served"
_NO_LORA = "remove it: LoRA adapters are not served"
_NO_BEAMS = "remove it: there is no beam search"
_LOOKAHEAD = "remove it: lookahead decoding is not served; use `speculative_method`"
_STATS = "remove it: statistics are at Triton's /metrics"

# TensorRT-LLM parameters that mean nothing here -> (values that may stay, what to do about the others).
FOREIGN: dict[str, tuple[tuple[str, ...], str]] = {
    "gpt_model_type": (("inflight_fused_batching", "inflight_batching"), "remove it: batching is always in flight"),
    "batching_strategy": (("inflight_fused_batching", "inflight_batching"), "remove it: batching is always in flight"),
    "max_beam_width": (("1",), _NO_BEAMS),
    "decoding_mode": (
        ("top_k", "top_p", "top_k_top_p", "auto"),
        "remove it: requests choose top_k and top_p; see `speculative_method`",
    ),
    "encoder_model_path": (("",), _NO_ENCODER),
    "cross_kv_cache_fraction": (("",), _NO_ENCODER),
    "multimodal_model_path": (("",), "remove it: this is a text model"),
    "kv_cache_onboard_blocks": (("", "true"), "remove it: blocks in host memory are always brought back"),
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
    "eagle_choices": (("",), "remove it: the tree grows by the head's own confidence; use `eagle_top_k`"),
    "lookahead_window_size": (("",), _LOOKAHEAD),
    "lookahead_ngram_size": (("",), _LOOKAHEAD),
    "lookahead_verification_set_size": (("",), _LOOKAHEAD),
    "speculative_decoding_fast_logits": (("", "0", "false", "1", "true"), "remove it: drafts never leave the process"),
    "multi_block_mode": (("", "true", "1"), "remove it: long sequences are always split over the GPU"),
    "enable_context_fmha_fp32_acc": (("", "true", "1"), "remove it: attention always accumulates in fp32"),
    "cuda_graph_mode": (("",), "remove it: the engine decides"),
    "cuda_graph_cache_size": (("",), "remove it: the engine decides"),
    "gpu_weights_percent": (("", "1", "1.0"), "remove it: weights are never streamed from host memory"),
    "guided_decoding_backend": (("", "xgrammar"), "remove it: xgrammar is built in"),
    "xgrammar_tokenizer_info_path": (("",), "remove it: the tokenizer is read from the checkpoint"),
    "accumulate_tokens": (("true", "false"), "remove it: streamed text is exact as it is"),
    "tensorrt_llm_model_name": (("",), "remove it: one model does the work of three; name the checkpoint with `model`"),
    "multimodal_encoders_name": (("",), "remove it: this is a text model"),
    "FORCE_CPU_ONLY_INPUT_TENSORS": (("no", "yes"), "remove it: it is for Python models"),
    "REPORT_CUSTOM_METRICS": (("true", "yes"), "remove it: metrics are always reported"),
    "ENABLE_VLLM_HEALTH_CHECK": (("true", "yes"), "remove it: readiness always tells the engine's state"),
}
