"""Every parameter of config.pbtxt and of `slipstream.LLM`: its name, where its value goes, what it means.

A table and nothing else: config_parse.py reads by it, build/make_docs.py writes docs/configuration.md from it. A
parameter's default is that of the dataclass field it sets (config.py). The parameters of a speculation method come
from its row in draft_methods.py.
"""

# ruff: noqa: E501  (one row, one line)
from __future__ import annotations

import json
from typing import Any

from slipstream.core.config import (
    ACCEPTANCES,
    ALIAS_SETS,
    DTYPES,
    GENERATION_CONFIGS,
    GROUP_SIZES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    NO_ALIASES,
    NO_SPECULATION,
    OVERLAP_MODES,
    PREFILL_DTYPES,
    SCHEDULER_POLICIES,
    TASKS,
    THROTTLES,
)
from slipstream.core.draft_methods import DRAFT_METHODS
from slipstream.core.errors import RequestError
from slipstream.core.logits_processors import named_classes
from slipstream.core.numerals import is_whole
from slipstream.core.parameter import FRACTION, Parameter, at_least, between
from slipstream.core.settings import BY_NAME, MAX_BEAMS
from slipstream.core.trace_context import ENDPOINT_FORM, is_endpoint


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
_MOST_LAYERS = 1000  # of a stage
_MOST_REQUESTS = 1 << 20  # of a step, far beyond any max_num_seqs that fits
MOST_PORT = (1 << 16) - 1
_METHODS = DRAFT_METHODS.names()
# what vLLM's `quantization` says of checkpoints that are stored so
_STORED_FORMATS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "modelopt")


def _are_methods(value: str) -> bool:
    names = [name.strip() for name in value.split(",")]
    return len(set(names)) == len(names) and all(name in (*_METHODS, NO_SPECULATION) for name in names)


def _are_alias_sets(value: str) -> bool:
    names = [name.strip() for name in value.split(",")]
    return names == [NO_ALIASES] or (len(set(names)) == len(names) and all(name in ALIAS_SETS for name in names))


def _is_graph_sizes(value: str) -> bool:
    sizes = value.split(",")
    return value in ("auto", "off") or all(is_whole(size.strip(), 1, _MOST_REQUESTS) for size in sizes)


def _is_address(value: str) -> bool:
    host, _, port = value.rpartition(":")
    return bool(host) and is_whole(port, 1, MOST_PORT)


def _is_endpoint(value: str) -> bool:
    kind, _, rest = value.partition("://")
    return not value or (kind == "tcp" and _is_address(rest)) or (kind == "ipc" and bool(rest))


def _are_adapters(value: str) -> bool:
    try:
        adapters = json.loads(value or "{}")
    except ValueError:
        return False
    return isinstance(adapters, dict) and all(isinstance(folder, str) and folder for folder in adapters.values())


def _are_classes(value: str) -> bool:
    try:
        named_classes(value)
    except ValueError:
        return False
    return True


def _are_counts(value: str) -> bool:
    return not value or all(is_whole(count, 1, _MOST_LAYERS) for count in value.split(","))


PARAMETERS: tuple[Parameter, ...] = (
    Parameter("task", "task", "What the model does: text generation, or TensorRT-LLM's `preprocessing` / `postprocessing`.", accepted=TASKS),
    Parameter("model", "model.model", "The checkpoint: a folder (relative to the model's folder), a GGUF file or a Hugging Face id. Without it: the version folder, if that holds one.", ("gpt_model_path", "engine_dir")),
    Parameter("tokenizer", "model.tokenizer", "A folder with tokenizer.json, that file, a GGUF file or a hub id; empty: the checkpoint's.", ("tokenizer_dir",)),
    Parameter("dtype", "model.dtype", "Type of weights and activations; `auto`: the checkpoint's on a GPU ([if it states none](models.md#what-to-know-before-loading), that of its tensors), `float32` on a CPU.", accepted=DTYPES, synonyms={"half": "float16", "float": "float32"}),
    Parameter("load_format", "model.load_format", "`dummy`: random weights; `null`: no model, every step emits a fixed token.", accepted=LOAD_FORMATS),
    Parameter("max_model_len", "model.max_model_len", "Longest sequence, prompt and output together; 0: the checkpoint's.", ("max_seq_len",), **at_least(0)),
    Parameter("rope_scaling", "model.rope_scaling", "JSON that replaces the checkpoint's rope scaling, such as `{\"rope_type\": \"yarn\", \"factor\": 4.0, \"original_max_position_embeddings\": 32768}`; empty: the checkpoint's ([what it changes](long-context.md#rope-scaling)).", limits="a JSON object"),
    Parameter("device", "model.device", "`auto`, `cpu`, `cuda` or `cuda:<index>`.", limits="auto, cpu, cuda or cuda:<index>", is_good=lambda v: str(v).split(":")[0] in ("auto", "cpu", "cuda")),
    Parameter("quantization", "model.quantization", "How linear layers are stored and multiplied ([formats](quantization.md#formats)); `auto`: as the checkpoint stores them. An unquantised checkpoint is quantised while it is loaded.", limits="a registered method", foreign=dict.fromkeys(_STORED_FORMATS, "leave it out: config.json of a quantised checkpoint names its format")),
    Parameter("quantization_group_size", "model.quantization_group_size", "Input features that share a scale of 4-bit weights; -1: all of a row; 0: the checkpoint's, or 128.", limits=f"one of {', '.join(map(str, GROUP_SIZES))}", is_good=lambda value: value in GROUP_SIZES),
    Parameter("quantize_lm_head", "model.quantize_lm_head", "Quantise the output head by the same method, also if the checkpoint leaves it alone or ties it to the embedding."),
    Parameter("attention_backend", "model.attention_backend", "Attention implementation; empty: the first that fits. `split_kv_fp8` is for an FP8 cache and rounds queries of long prompts to e4m3; `cpu` is for CPUs whose cache has the model's type."),
    Parameter("prefill_attention_dtype", "model.prefill_attention_dtype", "Type in which long prompts attend. `auto`: queries and keys in FP8 over an FP8 cache on Hopper, else `16bit`; `fp8`: probabilities and values, too, over an FP8 or a 16-bit cache, which is [not lossless](quantization.md#prompts-in-fp8).", accepted=PREFILL_DTYPES),
    Parameter("cuda_graphs", "model.cuda_graphs", "Steps that run as CUDA graphs: `auto`, `off`, or the numbers of requests, like `1,2,4,8`. Up to 1,024 with `auto`. They and verifications are captured at start, and steps of up to 64 prompts and 2,560 tokens afterwards.", limits="auto, off, or integers >= 1 with commas", is_good=_is_graph_sizes),
    Parameter("deterministic", "model.deterministic", "A request's tokens depend on nothing else in the batch, nor on chunks, prefix reuse, speculation or graphs; slower. [What it supports](speculation.md#the-same-text-to-the-last-bit-deterministic)."),
    Parameter("generation_config", "model.generation_config", "`auto`: the checkpoint's generation_config.json gives defaults for requests, as with vLLM ([order](contracts.md#which-value-counts)). `none`: only its `eos_token_id` is used.", accepted=GENERATION_CONFIGS),
    Parameter("num_threads", "model.num_threads", "Threads that compute on a CPU; 0: one fewer than the cores of the process, as threads that share a core with the server or its clients wait for each other. `OMP_NUM_THREADS` of the server may make it fewer.", **between(0, 1024)),
    Parameter("enable_lora", "model.enable_lora", "Serve LoRA adapters beside the model ([how](lora.md)). Steps then have slots for `max_loras` adapters of `max_lora_rank`."),
    Parameter("max_loras", "model.max_loras", "Adapters that run at once. Requests of others wait until one has no request left.", **between(1, 256)),
    Parameter("max_lora_rank", "model.max_lora_rank", "Largest rank of an adapter. All slots have this size.", **between(1, 512)),
    Parameter("max_cpu_loras", "model.max_cpu_loras", "Adapters that are loaded, in host memory.", **at_least(1)),
    Parameter("lora_modules", "model.lora_modules", "Adapters that are loaded with the model: a JSON object of names and PEFT folders, relative to the model's folder. Without it: `multi_lora.json` beside config.pbtxt or in the version folder, as vLLM's backend has it.", limits="a JSON object of names and folders", is_good=_are_adapters),
    Parameter("lora_root", "model.lora_root", "The folder below which `load_lora_adapter` finds adapters; empty: none are loaded or unloaded by request. Who reaches the server may then do it ([operations](operations.md#sleep-wake-and-reload))."),
    Parameter("lora_cache_host_memory_bytes", "model.lora_cache_bytes", "Host memory for adapters that clients send with `lora_weights`, TensorRT-LLM's way; 0: none is taken.", **at_least(0)),
    Parameter("seed", "model.seed", "Seed of `dummy` weights. Not of sampling: a request without `seed` draws its own.", **at_least(0)),
    Parameter("block_size", "cache.block_size", "Tokens per block of the KV cache.", ("tokens_per_block",), **_POWER_OF_TWO),
    Parameter("num_blocks", "cache.num_blocks", "Blocks of the KV cache; 0: as many as fit.", ("num_gpu_blocks_override",), **at_least(0)),
    Parameter("memory_fraction", "cache.memory_fraction", "Share of the GPU memory that is free after the weights, for the KV cache.", ("kv_cache_free_gpu_mem_fraction", "gpu_memory_utilization"), **FRACTION),
    Parameter("memory_bytes", "cache.memory_bytes", "Bytes of the KV cache, instead of `memory_fraction`; 0: unset, which on a CPU is 1 GiB, or half of what is free if that is less.", ("kv_cache_memory_bytes",), **at_least(0)),
    Parameter("kv_cache_dtype", "cache.dtype", "Type of keys and values ([types](quantization.md#kv-cache)); `auto`: `dtype`. A float type must equal `dtype`.", ("kv_cache_quant_algo",), KV_CACHE_DTYPES, synonyms={"fp8": "fp8_e4m3", "FP8": "fp8_e4m3", "INT8": "int8"}),
    Parameter("enable_prefix_caching", "cache.enable_prefix_caching", "Reuse the KV cache of prompt prefixes that were computed before.", ("enable_kv_cache_reuse",)),
    Parameter("kv_cache_host_memory_bytes", "cache.host_memory_bytes", "Host memory for evicted blocks: cold prefixes and preempted requests are copied back instead of computed again. Needs `enable_prefix_caching`; 0: off.", **at_least(0)),
    Parameter("enable_hybrid_kv_cache", "cache.enable_hybrid_kv_cache", "Sliding-window layers release the blocks that their window has passed, if the model also has full layers; the memory plan in the log says what they hold ([which models](models.md#what-to-know-before-loading))."),
    Parameter("kv_events_endpoint", "cache.events_endpoint", "Publish what enters and leaves the prefix cache, over ZeroMQ in vLLM's form, for cache-aware routers ([how](scaling.md#kv-events)): an address to bind, such as `tcp://127.0.0.1:5557`. The events hold the token ids of prompts. Empty: off.", limits="tcp://HOST:PORT or ipc://PATH", is_good=_is_endpoint),
    Parameter("kv_events_replay_endpoint", "cache.events_replay_endpoint", "Where subscribers ask for events that they have missed; empty: nowhere.", limits="tcp://HOST:PORT or ipc://PATH", is_good=_is_endpoint),
    Parameter("kv_events_topic", "cache.events_topic", "The topic of the events. llm-d's routers expect `kv@POD@MODEL`."),
    Parameter("max_num_batched_tokens", "scheduler.max_num_batched_tokens", "Token budget of one step. 8192 to 16384 prefill 1 to 4 % faster on an H200, but steps shared by decodes and prompts take longer.", ("max_num_tokens",), **at_least(1)),
    Parameter("max_mixed_prefill_tokens", "scheduler.max_mixed_prefill_tokens", "Prompt tokens of a step that also decodes ([why](long-context.md#long-prompts-beside-streams)); those late in a long prompt count more. 0: `max_num_batched_tokens`.", **at_least(0)),
    Parameter("max_mixed_step_ms", "scheduler.max_mixed_step_ms", "Time of a step that computes prompts beside decodes ([how](long-context.md#long-prompts-beside-streams)). 0: 25 ms or three steps of decodes alone, longer while prompts wait; on a CPU no bound.", **between(0, 1_000_000)),
    Parameter("max_mixed_step_ratio", "scheduler.max_mixed_step_ratio", "Time of such a step over one of decodes alone, also behind long contexts: with 1.4, streams wait at most about 1.4 times as long for a token while a prompt is computed. 0: no such bound.", limits="0 or a number from 1 to 1000", is_good=lambda value: value == 0.0 or 1.0 <= value <= 1000.0),
    Parameter("max_num_seqs", "scheduler.max_num_seqs", "Largest number of sequences that run at once.", **at_least(1)),
    Parameter("scheduler_policy", "scheduler.policy", "`max_utilization` may preempt; `guaranteed_no_evict` admits a request only if its blocks are reserved.", ("batch_scheduler_policy",), SCHEDULER_POLICIES),
    Parameter("max_waiting_requests", "scheduler.max_waiting_requests", "Requests in the queue; above it new ones get UNAVAILABLE.", ("max_queue_size",), **at_least(0)),
    Parameter("enable_chunked_prefill", "scheduler.enable_chunked_prefill", "Spread a long prompt over several steps.", ("enable_chunked_context",)),
    Parameter("default_max_queue_ms", "scheduler.default_max_queue_ms", "A request that waits longer ends with `timeout`; 0: no limit.", **at_least(0)),
    Parameter("priority_aging_s", "scheduler.priority_aging_s", "A waiting request gains one level of priority per this time ([priorities](operations.md#priorities-under-load)). 0: strictly by `priority`, so the lowest may never run.", limits="a number from 0 to 86400", is_good=lambda value: 0.0 <= value <= 86400.0),
    Parameter("overlap_scheduling", "scheduler.overlap_scheduling", "Schedule a step while the one before it runs; `auto`: on for GPUs.", accepted=OVERLAP_MODES),
    Parameter("replica_load_slack", "scheduler.replica_load_slack", "With several engines ([replicas](scaling.md#replicas)): how many more requests than the least loaded an engine may have and still be chosen for its prefix cache.", **between(0, 1_000_000)),
    Parameter("tensor_parallel_size", "parallel.tensor_parallel_size", "Processes that share every layer of the model, each with a device of its own: GPUs from `device` on ([scaling](scaling.md)). On a CPU they share its cores.", **between(1, 8)),
    Parameter("pipeline_parallel_size", "parallel.pipeline_parallel_size", "Stages, each with some of the layers, of `tensor_parallel_size` processes each ([pipeline parallelism](scaling.md#pipeline-parallelism)).", **between(1, 8)),
    Parameter("pipeline_layers", "parallel.pipeline_layers", "Numbers of layers of the stages, such as `10,12,10`; empty: so that the largest stage is as small as can be, where the first one has the embedding and the head too.", limits="numbers from 1 on with commas", is_good=_are_counts),
    Parameter("expert_parallel", "parallel.expert_parallel", "With several processes and a model of experts: each has some experts whole, instead of a part of every expert."),
    Parameter("rank_timeout_s", "parallel.rank_timeout_s", "With several processes: a step that takes longer, because one of them is stuck, ends all requests with UNAVAILABLE and the processes start again.", limits="a number from 0.1 to 3600", is_good=lambda value: 0.1 <= value <= 3600.0),
    Parameter("rank_load_timeout_s", "parallel.rank_load_timeout_s", "With several processes: a load or a wake fails if one is idle for so long and waits for no other. A tensor loaded, a read, a phase, a run of a compiler begin the time anew.", limits="a number from 30 to 86400", is_good=lambda value: 30.0 <= value <= 86400.0),
    Parameter("num_nodes", "parallel.num_nodes", "Machines that share the model, each with the same number of ranks; on each other one runs `slipstream worker` ([two nodes](scaling.md#two-nodes)).", **between(1, 8)),
    Parameter("rank_address", "parallel.rank_address", "With several nodes: address and port at which the engine waits for the ranks of the others.", limits="HOST:PORT", is_good=_is_address),
    Parameter("rank_secret_file", "parallel.rank_secret_file", "With several nodes, required: a file that all of them have, of at least 16 bytes. Who does not know it cannot join or read a step.", limits="a file"),
    Parameter("node_timeout_s", "parallel.node_timeout_s", "With several nodes: a rank of another one that is silent for so long is lost. It says something four times in this time.", limits="a number from 1 to 3600", is_good=lambda value: 1.0 <= value <= 3600.0),
    Parameter("node_start_timeout_s", "parallel.node_start_timeout_s", "With several nodes: how long a start waits for the ranks of the others.", limits="a number from 1 to 86400", is_good=lambda value: 1.0 <= value <= 86400.0),
    Parameter("speculative_method", "speculation.methods", "Speculation methods to load, with commas. The first is the default of requests; `none` or empty: no speculation.", limits=f"names of {', '.join(_METHODS)} with commas, or {NO_SPECULATION}", is_good=_are_methods),
    Parameter("num_draft_tokens", "speculation.num_draft_tokens", "Drafts per step by default, and the most that a request may ask for; 0: the method's own number.", ("num_speculative_tokens", "speculate_max_draft_token_num"), **between(0, _MOST_DRAFTS)),
    Parameter("speculative_acceptance", "speculation.acceptance", "How drafts are judged ([rules](speculation.md#what-is-accepted)). `exact` and `rejection` lose nothing; `typical` and `top_p_window` change the distribution.", accepted=ACCEPTANCES),
    Parameter("speculation_throttle", "speculation.throttle", "`auto`: fewer or no drafts while drafts do not pay; `off`: always draft.", accepted=THROTTLES),
    Parameter("free_tokens", "speculation.free_tokens", "Most rows of a step with drafts. 0: on a GPU as many as pay, measured at start; on a CPU no limit. -1: no limit.", **at_least(-1)),
    *(parameter for method in DRAFT_METHODS.values() for parameter in method.parameters),
    Parameter("typical_threshold", "speculation.typical_threshold", "For `typical`: drafts with a higher probability are always accepted.", ("posterior_threshold",), **FRACTION),
    Parameter("typical_alpha", "speculation.typical_alpha", "For `typical`: drafts above this factor of exp(-entropy) are accepted.", ("posterior_alpha",), **FRACTION),
    Parameter("acceptance_top_p", "speculation.acceptance_top_p", "For `top_p_window`: accept drafts among the tokens of this total probability, if the request sets no top_p.", **FRACTION),
    Parameter("acceptance_window", "speculation.acceptance_window", "For `top_p_window`: a second-likeliest draft is accepted if this many likeliest tokens follow it.", ("speculate_verify_window",), **at_least(1)),
    Parameter("guided_max_regex_chars", "structured_output.max_regex_chars", "Characters of a regular expression, or of all choices together.", **at_least(1)),
    Parameter("guided_max_grammar_bytes", "structured_output.max_grammar_bytes", "Bytes of an EBNF grammar.", **at_least(1)),
    Parameter("guided_max_schema_bytes", "structured_output.max_schema_bytes", "Bytes of a JSON schema.", **at_least(1)),
    Parameter("guided_max_properties", "structured_output.max_properties", "Properties of a JSON schema, of all its objects together.", **at_least(1)),
    Parameter("guided_max_depth", "structured_output.max_depth", "Levels of nesting in a JSON schema, and of parentheses in a regular expression or an EBNF grammar.", **at_least(1)),
    Parameter("guided_max_repeat", "structured_output.max_repeat", "Largest `minLength`, `maxLength`, `minItems` and the like of a JSON schema, and number in `{m,n}` of a regular expression or a grammar.", **at_least(1)),
    Parameter("guided_max_compile_ms", "structured_output.max_compile_ms", "CPU time to compile a grammar, in a process of its own; above it INVALID_ARG.", **at_least(1)),
    Parameter("guided_max_step_ms", "structured_output.max_step_ms", "Time of a request's grammar for one token; above it INVALID_ARG. Other requests do not wait.", **at_least(1)),
    Parameter("guided_max_request_ms", "structured_output.max_request_ms", "CPU time of a request's grammar for all its tokens; above it INVALID_ARG.", **at_least(1)),
    Parameter("guided_memory_bytes", "structured_output.memory_bytes", "Memory to compile a grammar, and memory to match all of them, beyond the base of the process.", **between(67108864, 1 << 40)),
    Parameter("guided_cache_bytes", "structured_output.cache_bytes", "Compiled grammars that are kept; those in use are always kept.", **at_least(0)),
    Parameter("default_max_tokens", "serving.default_max_tokens", "`max_tokens` of a request without it; if not given, see `generation_config`.", **_default_of("max_tokens")),
    Parameter("default_temperature", "serving.default_temperature", "Temperature of a request without `temperature`, `top_k` and `top_p`; if not given, see `generation_config`. TensorRT-LLM's clients expect 0 (greedy).", **_default_of("temperature")),
    Parameter("stream_interval", "serving.stream_interval", "Tokens per streamed response by default; the first token leaves at once.", **_default_of("stream_interval")),
    Parameter("max_response_entries", "serving.max_response_entries", "Most entries of one response: n x max_tokens x (1 + `logprobs`), plus the prompt's with `prompt_logprobs` or echo. Streams count `stream_interval`, not max_tokens, except beam searches. An entry with log-probabilities takes some 100 bytes.", **at_least(1)),
    Parameter("max_logprobs", "serving.max_logprobs", "Most alternatives that `logprobs` and `prompt_logprobs` may ask for; -1: the whole vocabulary, which holds up the text of other requests for some tenths of a second per token.", **at_least(-1)),
    Parameter("max_logits_bytes", "serving.max_logits_bytes", "Bytes of `context_logits` and `generation_logits` that all running requests hold together: 4 x vocabulary for each token. 0: neither is served.", **between(0, 120 << 20)),
    Parameter("logits_processors", "model.logits_processors", "Python classes that requests may name to change their logits ([how](processors.md)). They run in the engine's process.", limits="`module:Class` or `name=module:Class`, with commas, each name once", is_good=_are_classes),
    Parameter("max_logits_processor_bytes", "serving.max_logits_processor_bytes", "Bytes of the `kwargs` of a request's `logits_processors`, as JSON.", **between(0, 1 << 20)),
    Parameter("max_prompt_table_bytes", "serving.max_prompt_table_bytes", "Bytes of `prompt_embedding_table` that all running requests hold together; 0: none is taken.", **between(0, 1 << 30)),
    Parameter("max_beam_width", "scheduler.max_beam_width", "Most beams of a request's beam search; 1: none. A step of a search is as much work as that many requests.", **between(1, MAX_BEAMS)),
    Parameter("stop_by_request_id", "serving.stop_by_request_id", "Accept `stop: true`, which ends the running request of the same id ([risks](clients.md#stop-a-generation)). Off: refused."),
    Parameter("enable_sleep_mode", "serving.enable_sleep_mode", "Accept `control`, which puts the model to sleep, wakes it and reloads its weights ([how, and who may](operations.md#sleep-wake-and-reload)). Off: refused."),
    Parameter("wake_on_request", "serving.wake_on_request", "A request wakes a model that sleeps, and waits for it. Off: UNAVAILABLE."),
    Parameter("reload_root", "serving.reload_root", "Folder below which `reload_weights` may name checkpoints; empty: only the model's own, rewritten."),
    Parameter("exclude_input_in_output", "serving.exclude_input_in_output", "Leave the prompt out of a response; unset: left out when streaming, echoed otherwise."),
    Parameter("drain_timeout_s", "serving.drain_timeout_s", "Seconds that running requests have to finish at unload or SIGTERM.", limits="a number >= 0", is_good=lambda value: value >= 0.0),
    Parameter("max_tokenizing_bytes", "serving.max_tokenizing_bytes", "Bytes of waiting requests above 8192 bytes each that are not tokenised yet; above it, or above `max_waiting_requests` of them, UNAVAILABLE. A request of more bytes is refused.", **at_least(1)),
    Parameter("max_total_request_bytes", "serving.max_total_request_bytes", "Bytes of host memory that all requests keep which wait or run, above 65536 bytes each: 48 a prompt token, 8 more for each sequence of `n`, 122 a log-probability of one response. Above it UNAVAILABLE; a request of more bytes is refused.", **at_least(1)),
    Parameter("add_special_tokens", "serving.add_special_tokens", "The tokenizer puts its special tokens around a prompt."),
    Parameter("skip_special_tokens", "serving.skip_special_tokens", "Leave special tokens out of text."),
    Parameter("metrics_aliases", "serving.metrics_aliases", "Repeat metrics under the names of other backends ([list](metrics.md#names-of-other-backends)): `vllm`, `tensorrt_llm`, both with a comma, or `none`.", limits="vllm, tensorrt_llm, both with a comma, or none", is_good=_are_alias_sets),
    Parameter("otlp_endpoint", "serving.otlp_endpoint", "Send traces of requests to this OpenTelemetry collector ([traces](metrics.md#traces)); empty: none. Needs the extra `tracing`.", limits=ENDPOINT_FORM, is_good=is_endpoint),
    Parameter("trace_ratio", "serving.trace_ratio", "Share of requests that are traced, of those that bring no trace of their own.", limits="a number from 0 to 1", is_good=lambda value: 0.0 <= value <= 1.0),
    Parameter("ignored_request_parameters", "serving.ignored_request_parameters", "Patterns such as `x-*,traceparent`: request parameters to ignore (headers that Triton forwards) instead of refusing them."),
)  # fmt: skip

_PERIOD = "remove it: Slipstream has no polling loops to tune"
_ONE_PROCESS = "remove it: set `device` instead"
_NO_ENCODER = "remove it: encoder-decoder models are not served"
_NO_LORA = "remove it: slots of adapters are sized by `max_loras` and `max_lora_rank`"
_LOOKAHEAD = "remove it: lookahead decoding is not served; use `speculative_method`"
_OTHER_ENGINE = "remove it: there is one engine, and no such choice"
_CHECKPOINTS = "remove it: config.json of the checkpoint says it"
_STATS = "remove it: statistics are at Triton's /metrics"

# TensorRT-LLM parameters that mean nothing here -> (values that may stay, what to do about the others).
FOREIGN: dict[str, tuple[tuple[str, ...], str]] = {
    "gpt_model_type": (("inflight_fused_batching", "inflight_batching"), "remove it: batching is always in flight"),
    "batching_strategy": (("inflight_fused_batching", "inflight_batching"), "remove it: batching is always in flight"),
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
    "sink_token_length": (("", "0"), "remove it: the sinks are the checkpoint's"),
    "normalize_log_probs": (("", "true", "false"), "remove it: log-probabilities are sums, not means"),
    "gpu_device_ids": (("",), _ONE_PROCESS),
    "participant_ids": (("",), _ONE_PROCESS),
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
    # vLLM's engine arguments
    "enforce_eager": (("false",), "use `cuda_graphs: off`"),
    "fully_sharded_loras": (("false",), "remove it: adapters run on one GPU"),
    "lora_extra_vocab_size": (("", "0"), "remove it: adapters do not extend the vocabulary"),
    "lora_dtype": (("", "auto"), "remove it: adapters have the type of activations"),
    "enable_prompt_adapter": (("false",), "remove it: requests bring `prompt_embedding_table`"),
    "data_parallel_size": (("1",), "remove it: `instance_group` has the number of engines"),
    "enable_expert_parallel": (("false",), "use `expert_parallel` with `tensor_parallel_size`"),
    "distributed_executor_backend": (("", "mp", "uni"), _OTHER_ENGINE),
    "worker_cls": (("", "auto"), _OTHER_ENGINE),
    "model_impl": (("", "auto", "vllm"), _OTHER_ENGINE),
    "swap_space": (("", "0", "4"), "remove it: use `kv_cache_host_memory_bytes`"),
    "cpu_offload_gb": (("", "0"), "remove it: weights are never kept in host memory"),
    "trust_remote_code": (("false",), "remove it: no code of a checkpoint is run"),
    "tokenizer_mode": (("", "auto"), "remove it: the tokenizer is tokenizer.json"),
    "skip_tokenizer_init": (("false",), "remove it: requests may use `input_ids` and `detokenize`"),
    "revision": (("", "main"), "remove it: download that revision and name the folder"),
    "download_dir": (("",), "remove it: the hub's cache is used"),
    "served_model_name": (("",), "remove it: the name is the folder's; the gateway has --alias"),
    "max_seq_len_to_capture": (("",), "remove it: see `cuda_graphs`"),
    "compilation_config": (("",), "remove it: nothing is compiled at start; see `cuda_graphs`"),
    "speculative_config": (("",), "use `speculative_method` and the parameters of that method"),
    "scheduling_policy": (("", "fcfs", "priority"), "remove it: requests have a `priority`"),
    "async_scheduling": (("",), "use `overlap_scheduling`"),
    "disable_sliding_window": (("false",), _CHECKPOINTS),
    "hf_overrides": (("",), _CHECKPOINTS),
    "rope_theta": (("",), _CHECKPOINTS),
    "override_generation_config": (("",), "remove it: use `default_temperature`, `default_max_tokens` and the like"),
    "limit_mm_per_prompt": (("",), "remove it: this is a text model"),
    "kv_transfer_config": (("",), "remove it: prompts are computed where they are answered"),
    "calculate_kv_scales": (("false",), "remove it: scales are the checkpoint's or per token"),
    "disable_log_stats": (("true", "false"), _STATS),
    "disable_log_requests": (("true", "false"), _STATS),
    "REPORT_CUSTOM_METRICS": (("true", "yes"), "remove it: metrics are always reported"),
    "ENABLE_VLLM_HEALTH_CHECK": (("true", "yes"), "remove it: readiness always tells the engine's state"),
}
