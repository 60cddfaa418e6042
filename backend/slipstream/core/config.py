"""The engine's configuration: nested frozen dataclasses, built once from config.pbtxt parameters (core/config_parse.py)
or keyword arguments of `slipstream.LLM`. Numbers found at run time (blocks that fit) are values, not config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slipstream.core.draft_methods import DraftMethod, default_options
from slipstream.core.replicas import Replica

SCHEDULER_POLICIES = ("max_utilization", "guaranteed_no_evict")
KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16", "fp8_e4m3", "int8", "int4")
DTYPES = ("auto", "float32", "float16", "bfloat16")
GROUP_SIZES = (0, -1, 32, 64, 128)
TASKS = ("generate", "tokenize", "detokenize")
PREFILL_DTYPES = ("auto", "16bit", "fp8")
OVERLAP_MODES = ("auto", "on", "off")
GENERATION_CONFIGS = ("auto", "none")
LOAD_FORMATS = ("auto", "safetensors", "dummy", "null")
ACCEPTANCES = ("exact", "rejection", "typical", "top_p_window")
THROTTLES = ("auto", "off")
NO_SPECULATION = "none"
ALIAS_SETS = ("vllm", "tensorrt_llm")  # whose names metrics have beside ours
NO_ALIASES = "none"
T = TypeVar("T")


@dataclass(frozen=True)
class ModelConfig:
    """model: a checkpoint folder or hub id. load_format "dummy": random weights of the checkpoint's shapes; "null": no
    weights and no computation, every step emits a fixed token (to measure everything around the model)."""

    model: str = ""
    tokenizer: str = ""  # "" = the model's own
    dtype: str = "auto"
    load_format: str = "auto"
    max_model_len: int = 0  # 0 = the checkpoint's
    rope_scaling: str = ""  # JSON; "" = the checkpoint's
    device: str = "auto"
    quantization: str = "auto"  # the checkpoint's own
    quantization_group_size: int = 0  # the checkpoint's, or 128; -1 = one group a row
    quantize_lm_head: bool = False
    attention_backend: str = ""
    prefill_attention_dtype: str = "auto"
    cuda_graphs: str = "auto"  # or "off", or sizes like "1,2,4,8"
    deterministic: bool = False
    num_threads: int = 0  # of a CPU; 0 = one fewer than cores
    generation_config: str = "auto"
    seed: int = 0
    enable_lora: bool = False
    max_loras: int = 4  # adapters that run at once, each in a slot on the device
    max_lora_rank: int = 16
    max_cpu_loras: int = 64  # adapters that are loaded, in host memory
    lora_modules: str = ""  # JSON: names of adapters and their folders
    lora_root: str = ""  # below which a command may load others; "" = none
    lora_cache_bytes: int = 0  # host memory of adapters that clients send; 0 = none is taken
    logits_processors: str = ""  # classes that requests may name, core/logits_processors.py
    logits_processor_folders: tuple[str, ...] = field(default=(), compare=False)  # besides the Python path; no setting


@dataclass(frozen=True)
class CacheConfig:
    """num_blocks: 0 = the number that fits `memory_fraction` of free device memory (GPU) or `memory_bytes` (CPU).

    host_memory_bytes: for blocks evicted from the pool; 0 = evicted blocks are recomputed. enable_hybrid_kv_cache:
    windowed layers release blocks that their window has passed.
    """

    block_size: int = 64
    num_blocks: int = 0
    memory_fraction: float = 0.9
    memory_bytes: int = 0
    dtype: str = "auto"
    enable_prefix_caching: bool = True
    host_memory_bytes: int = 0
    enable_hybrid_kv_cache: bool = True
    events_endpoint: str = ""  # where routers hear what is in the prefix cache; "" = nowhere
    events_replay_endpoint: str = ""  # where they ask for what they have missed
    events_topic: str = ""


@dataclass(frozen=True)
class SchedulerConfig:
    """max_num_batched_tokens: the token budget of one step. max_mixed_prefill_tokens: of its prompts beside decodes, in
    tokens without a context (core/prefill_budget.py); 0 = max_num_batched_tokens. max_mixed_step_ms,
    max_mixed_step_ratio: of such a step's time, and of it over that of decodes alone; both 0 = automatic on GPUs.
    max_waiting_requests: above it -> UNAVAILABLE."""

    max_num_batched_tokens: int = 4096
    max_mixed_prefill_tokens: int = 0
    max_mixed_step_ms: int = 0
    max_mixed_step_ratio: float = 0.0
    max_num_seqs: int = 256
    policy: str = "max_utilization"
    max_waiting_requests: int = 1024
    enable_chunked_prefill: bool = True
    default_max_queue_ms: int = 0  # 0 = wait without limit
    max_beam_width: int = 10  # beams of a request's beam search, the bound of `beam_width`; 1 = none
    priority_aging_s: float = 5.0  # a waiting request gains one priority level per interval; 0 = never
    overlap_scheduling: str = "auto"  # on for CUDA
    replica_load_slack: int = 4  # requests that a replica may have more than the least loaded one (backend/triton)


@dataclass(frozen=True)
class ParallelConfig:
    """tensor_parallel_size: processes, each with a device and a part of every layer. pipeline_parallel_size: groups of
    these, each with some of the layers; pipeline_layers: their numbers, with commas, "" = by memory.

    rank_timeout_s: how long the others may keep a step waiting. rank_load_timeout_s: how long one may do nothing of a
    load or a wake, unless it waits for another. num_nodes: machines that have the same number of them each; the
    engine's listens at rank_address for those of the others, which know the secret of rank_secret_file."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pipeline_layers: str = ""
    expert_parallel: bool = False  # ranks have whole experts, instead of a part of each
    rank_timeout_s: float = 60.0
    rank_load_timeout_s: float = 600.0
    num_nodes: int = 1
    rank_address: str = "0.0.0.0:29500"
    rank_secret_file: str = ""
    node_timeout_s: float = 15.0  # without a word of a rank of another node
    node_start_timeout_s: float = 600.0  # until the ranks of all nodes have come
    replica: Replica = field(default_factory=Replica)  # from config.pbtxt: which of the model's engines this is

    @property
    def devices_per_node(self) -> int:
        return self.num_ranks // self.num_nodes

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True)
class SpeculationConfig:
    """methods: loaded methods, comma-separated; the first is the default of requests; "" = no speculation.

    num_draft_tokens: 0 = each method's own. free_tokens: max rows of a step with drafts; 0 = measured at start on a
    GPU, -1 = no limit. options: each method's own parameters, by its name.
    """

    methods: str = ""
    num_draft_tokens: int = 0
    acceptance: str = "exact"
    throttle: str = "auto"
    free_tokens: int = 0
    typical_threshold: float = 0.09
    typical_alpha: float = 0.3
    acceptance_top_p: float = 0.8
    acceptance_window: int = 2
    options: Mapping[str, Any] = field(default_factory=default_options)

    @property
    def loaded(self) -> tuple[str, ...]:
        """The methods by name, the default one first."""
        return tuple(
            name.strip() for name in self.methods.split(",") if name.strip() and name.strip() != NO_SPECULATION
        )

    def options_of(self, kind: type[T]) -> T:
        """The options of the method that declares them by this dataclass."""
        return next(options for options in self.options.values() if isinstance(options, kind))

    def checkpoint_of(self, method: DraftMethod) -> str:
        """The value of the parameter that names the method's checkpoint; "" for a method that needs none."""
        value: str = getattr(self.options[method.name], method.checkpoint) if method.checkpoint else ""
        return value


@dataclass(frozen=True)
class StructuredOutputConfig:
    """Limits of structured output: the size of a grammar, and the cost of compiling and matching it.

    max_*_ms: CPU time of the grammar process, except max_step_ms: wall time of one call."""

    max_regex_chars: int = 16384
    max_grammar_bytes: int = 65536
    max_schema_bytes: int = 131072
    max_properties: int = 1000
    max_depth: int = 64
    max_repeat: int = 10000
    max_compile_ms: int = 5000
    max_step_ms: int = 5000
    max_request_ms: int = 10000
    memory_bytes: int = 1 << 30
    cache_bytes: int = 64 << 20


EXIT_RESERVE_S = 10  # server exit beyond drain_timeout_s: answers running requests, kills hanging engines


@dataclass(frozen=True)
class ServingConfig:
    """Defaults of request settings, and limits of the server process.

    stated: the parameters that the configuration gives. generation_defaults: (setting, value) of the checkpoint's
    generation_config.json, filled in at load.
    """

    stated: frozenset[str] = field(default=frozenset(), compare=False)
    generation_defaults: tuple[tuple[str, Any], ...] = ()
    default_max_tokens: int = 16
    default_temperature: float = 1.0  # for requests without temperature, top_k and top_p
    stream_interval: int = 1
    exclude_input_in_output: bool | None = None  # None: excluded when streaming, echoed otherwise (vLLM backend)
    drain_timeout_s: float = 60.0
    max_tokenizing_bytes: int = 1 << 28  # total size of large requests that wait to be tokenised
    # host memory of all that wait or run: a full queue and batch, 1,280 prompts of 32k tokens, are 2.0e9 bytes
    max_total_request_bytes: int = 1 << 31
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    max_response_entries: int = 1 << 20  # max tokens and log-probability alternatives of one response
    max_logits_bytes: int = 0  # logits of all running requests together; 0: none are sent
    max_logprobs: int = 20  # alternatives of a token, the bound of `logprobs`; -1: the whole vocabulary
    max_prompt_table_bytes: int = 1 << 26  # embeddings of prompts that clients send, of all running requests
    max_logits_processor_bytes: int = 16384  # arguments of a request's logits processors, as JSON
    stop_by_request_id: bool = False  # whether `stop: true` from any client ends the request of that id
    enable_sleep_mode: bool = False  # whether any client may have the model sleep, wake and reload its weights
    wake_on_request: bool = False
    reload_root: str = ""  # where `reload_weights` may read checkpoints; "" = the model's own alone
    ignored_request_parameters: str = ""  # patterns like "x-*,traceparent" of request parameters to ignore
    metrics_aliases: str = "vllm,tensorrt_llm"  # sets of core/metric_aliases.py, with commas
    model_name: str = ""  # Triton's
    otlp_endpoint: str = ""  # a collector of traces; "" = none
    trace_ratio: float = 1.0  # of requests without a trace of their own
    is_decoupled: bool = True  # from config.pbtxt; False: one response per request, for plain infer calls
    max_batch_size: int = 0  # from config.pbtxt; above 0 every tensor has a leading batch dimension of 1

    @property
    def exit_timeout_s(self) -> int:
        """Minimum --exit-timeout-secs of the server (default 30): server 2.51 hangs when requests outlive it."""
        return math.ceil(self.drain_timeout_s) + EXIT_RESERVE_S


@dataclass(frozen=True)
class EngineConfig:
    task: str = "generate"
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    structured_output: StructuredOutputConfig = field(default_factory=StructuredOutputConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)
