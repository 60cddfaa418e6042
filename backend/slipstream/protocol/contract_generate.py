"""The tensors of the `generate` task: the vLLM backend's, TensorRT-LLM's where they apply, and a few of our own.

Inputs that are served are those of the table of settings (settings.py); those that are not, and the outputs, are the
tables here. contract.py makes declarations and documentation of them. dims are those of the origin without the batch
dimension.
"""

# ruff: noqa: E501  (one row, one line)
from __future__ import annotations

from slipstream.core.contract_origins import SLIPSTREAM, TRT_CORE, TRT_ENSEMBLE, TRT_LLMAPI, VLLM
from slipstream.core.setting_kinds import (
    Biases,
    Choice,
    Flag,
    Integer,
    Kind,
    Number,
    Numbers,
    Object,
    Text,
    Texts,
    TokenIds,
    WordsIds,
)
from slipstream.core.setting_values import MAX_INT32
from slipstream.core.settings import SETTINGS, TRT, Setting
from slipstream.core.wire_messages import DataType
from slipstream.protocol.tensor_spec import InputSpec, OutputSpec, Use

BOOL, BYTES, FP16, FP32 = DataType.BOOL, DataType.BYTES, DataType.FP16, DataType.FP32
INT32, INT64, UINT8, UINT32, UINT64 = DataType.INT32, DataType.INT64, DataType.UINT8, DataType.UINT32, DataType.UINT64

ONE = (1,)
ANY = (-1,)
TRT_ALL = (TRT_ENSEMBLE, TRT_CORE, TRT_LLMAPI)


def _neutral(
    name: str, dtype: DataType, dims: tuple[int, ...], origins: tuple[str, ...], reason: str, *values: object
) -> InputSpec:
    doc = "Declared for clients that send it; not served."
    return InputSpec(name, dtype, dims, "", origins, doc, use=Use.NEUTRAL_ONLY, neutral=values, reason=reason)


# kind of a setting -> type and dims of its tensors
_TENSOR_TYPES: dict[type[Kind], tuple[DataType, tuple[int, ...]]] = {
    Integer: (INT32, ONE),
    Number: (FP32, ONE),
    Flag: (BOOL, ONE),
    Text: (BYTES, ONE),
    Choice: (BYTES, ONE),
    Object: (BYTES, ONE),
    Texts: (BYTES, ANY),
    TokenIds: (INT32, ANY),
    Biases: (FP32, ANY),
    WordsIds: (INT32, (2, -1)),
}


def inputs_of(setting: Setting) -> tuple[InputSpec, ...]:
    """The tensors that set it: the first has its meaning, the others are other backends' names of the same."""
    specs: list[InputSpec] = []
    for name, origins in setting.tensors.items():
        dtype, dims = _TENSOR_TYPES.get(type(setting.kind), (FP16, ANY))
        if isinstance(setting.kind, Numbers):
            dtype, dims = setting.kind.dtype, (-1, setting.kind.num_columns)
        if isinstance(setting.kind, Integer) and setting.kind.high > MAX_INT32:
            dtype = UINT64
        doc = f"Same as `{specs[0].name}`." if specs else setting.doc
        specs.append(InputSpec(name, dtype, dims, setting.name, origins, doc))
    return tuple(specs)


_NO_LORA = "adapters are loaded by the operator and named by `lora_name`"
_NO_IMAGE = "this is a text model"
_NO_DRAFT = "drafts are made by the server, not sent by clients"
_NO_ENCODER = "the model has no encoder"
_ANY_TABLE = "Accepted; the prefix cache knows tables by their content."
_NO_RETENTION = "the prefix cache keeps the most recently used blocks and takes no hints"
_NO_LOOKAHEAD = "lookahead decoding is not served"

NOT_SERVED = (
    InputSpec("pad_id", INT32, ONE, "", TRT, "Accepted; nothing is padded here.", use=Use.WITHOUT_EFFECT),
    _neutral("beam_search_diversity_rate", FP32, ONE, (TRT_CORE,), "beams are not made diverse", 0.0),
    _neutral("runtime_top_p_min", FP32, ONE, (TRT_CORE,), "top_p does not decay", 0.0, 1e-6),
    _neutral("runtime_top_p_decay", FP32, ONE, (TRT_CORE,), "top_p does not decay", 0.0, 1.0),
    _neutral("runtime_top_p_reset_ids", INT32, ONE, (TRT_CORE,), "top_p does not decay", -1),
    _neutral("decoder_text_input", BYTES, ONE, (TRT_ENSEMBLE,), _NO_ENCODER, ""),
    _neutral("decoder_input_ids", INT32, ANY, (TRT_CORE,), _NO_ENCODER),
    _neutral("decoder_input_lengths", INT32, ONE, (TRT_CORE,), _NO_ENCODER, 0),
    _neutral("draft_input_ids", INT32, ANY, (TRT_CORE,), _NO_DRAFT),
    _neutral("draft_logits", FP32, (-1, -1), (TRT_CORE,), _NO_DRAFT),
    _neutral("draft_acceptance_threshold", FP32, ONE, (TRT_CORE,), _NO_DRAFT, 0.0),
    _neutral("use_draft_logits", BOOL, ONE, (TRT_ENSEMBLE,), _NO_DRAFT, False),
    InputSpec("prompt_table_extra_id", UINT64, ONE, "", TRT, _ANY_TABLE, use=Use.WITHOUT_EFFECT),
    InputSpec("prompt_table_extra_ids", UINT64, ANY, "", (TRT_CORE,), _ANY_TABLE, use=Use.WITHOUT_EFFECT),
    _neutral("lora_id", INT32, ONE, (TRT_LLMAPI,), _NO_LORA, 0),
    _neutral("lora_ckpt_source", BYTES, ONE, (TRT_LLMAPI,), _NO_LORA, "", "hf"),
    _neutral("image", BYTES, ANY, (VLLM,), _NO_IMAGE),
    _neutral("image_url", BYTES, ANY, (TRT_LLMAPI,), _NO_IMAGE, ""),
    _neutral("image_input", FP16, (-1, 3, -1, -1), (TRT_ENSEMBLE,), _NO_IMAGE),
    _neutral("image_bytes_input", UINT8, (-1, -1, -1, -1), (TRT_ENSEMBLE,), _NO_IMAGE),
    _neutral("image_url_input", BYTES, ANY, (TRT_ENSEMBLE,), _NO_IMAGE, ""),
    _neutral("video_bytes_input", UINT8, (-1, -1, -1, -1), (TRT_ENSEMBLE,), _NO_IMAGE),
    _neutral("embedding_request", BYTES, ONE, (VLLM,), "embeddings are not served", ""),
    _neutral("context_phase_params", UINT8, ANY, (TRT_CORE,), "context and generation run in one server"),
    _neutral("retention_token_range_starts", INT32, ANY, (TRT_CORE,), _NO_RETENTION),
    _neutral("retention_token_range_ends", INT32, ANY, (TRT_CORE,), _NO_RETENTION),
    _neutral("retention_token_range_priorities", INT32, ANY, (TRT_CORE,), _NO_RETENTION),
    _neutral("retention_token_range_durations_ms", INT32, ANY, (TRT_CORE,), _NO_RETENTION),
    _neutral("retention_decode_priority", INT32, ONE, (TRT_CORE,), _NO_RETENTION, 0),
    _neutral("retention_decode_duration_ms", INT32, ONE, (TRT_CORE,), _NO_RETENTION, 0),
    _neutral("lookahead_window_size", INT32, ONE, (TRT_CORE,), _NO_LOOKAHEAD, 0, 1),
    _neutral("lookahead_ngram_size", INT32, ONE, (TRT_CORE,), _NO_LOOKAHEAD, 0, 1),
    _neutral("lookahead_verification_set_size", INT32, ONE, (TRT_CORE,), _NO_LOOKAHEAD, 0),
)

INPUTS = (*(spec for setting in SETTINGS for spec in inputs_of(setting)), *NOT_SERVED)

_PERF = "return_perf_metrics"
_IDS = "return_output_ids"

OUTPUTS = (
    OutputSpec("text_output", BYTES, ANY, (VLLM, TRT_ENSEMBLE, TRT_LLMAPI), "The text: one string, or n in one response; when streaming, what is new."),
    OutputSpec("finish_reason", BYTES, ANY, (VLLM, TRT_LLMAPI), "`stop`, `length`, `cancelled` or `timeout` with a sequence's last response, else empty.", "return_finish_reason"),
    OutputSpec("stop_reason", BYTES, ANY, (TRT_LLMAPI,), "The stop string, or the number of the stop token, that ended the sequence, else empty.", "return_stop_reason"),
    OutputSpec("cumulative_logprob", FP32, ANY, (VLLM, TRT_LLMAPI), "Sum of the log-probabilities of the sequence so far.", "return_cumulative_logprob"),
    OutputSpec("logprobs", BYTES, ANY, (VLLM,), 'JSON, per new token: {"id": {"logprob", "rank", "decoded_token"}, ...}, the chosen token first.', "return_logprobs"),
    OutputSpec("prompt_logprobs", BYTES, ANY, (SLIPSTREAM,), "The same per prompt token, null for the first; with the first response, then `null`.", "return_prompt_logprobs"),
    OutputSpec("prompt_token_ids", INT32, ANY, (SLIPSTREAM,), "Token ids of the prompt, with the first response of the first sequence, then empty.", "return_prompt_token_ids"),
    OutputSpec("num_input_tokens", UINT32, ONE, (VLLM,), "Tokens of the prompt.", "return_num_input_tokens"),
    OutputSpec("num_output_tokens", UINT32, ANY, (VLLM,), "Tokens of this response; their sum over a stream is the total.", "return_num_output_tokens"),
    OutputSpec("output_ids", INT32, (-1, -1), (TRT_CORE,), "[1, n]: the token ids of this response, after the prompt's when that is echoed.", _IDS),
    OutputSpec("sequence_length", INT32, ANY, (TRT_CORE,), "[1]: number of `output_ids`.", _IDS),
    OutputSpec("context_ids", INT32, ANY, (SLIPSTREAM,), "Tokens before `output_ids` that a stateless decoder needs (CONTEXT_TOKENS of `postprocessing`)."),
    OutputSpec("text_length", INT32, ONE, (SLIPSTREAM,), "Characters of `text_output` (TEXT_LENGTH of `postprocessing`)."),
    OutputSpec("request_handle", UINT64, ONE, (SLIPSTREAM,), "The server's number of the request: random, and the right to cancel it through `postprocessing`; keep it secret."),
    OutputSpec("cum_log_probs", FP32, ANY, TRT, "[1]: as `cumulative_logprob`.", "return_log_probs"),
    OutputSpec("output_log_probs", FP32, (-1, -1), TRT, "[1, n]: log-probability of each new token.", "return_log_probs"),
    OutputSpec("context_logits", FP32, (-1, -1), TRT, "[m, vocabulary]: the logits behind each token of the prompt, with the first response, then empty.", "return_context_logits"),
    OutputSpec("generation_logits", FP32, (-1, -1, -1), TRT, "[1, n, vocabulary]: the logits that each new token was drawn from, before penalties, biases and grammars.", "return_generation_logits"),
    OutputSpec("batch_index", INT32, ONE, TRT, "Always 0: a request is one prompt."),
    OutputSpec("sequence_index", INT32, ONE, TRT, "Which of the n sequences this response belongs to."),
    OutputSpec("kv_cache_alloc_new_blocks", INT32, ONE, TRT_ALL, "Cache blocks newly allocated for the sequence so far.", _PERF),
    OutputSpec("kv_cache_reused_blocks", INT32, ONE, TRT, "Cache blocks found in the prefix cache.", _PERF),
    OutputSpec("kv_cache_alloc_total_blocks", INT32, ONE, TRT_ALL, "Both together.", _PERF),
    OutputSpec("kv_cache_reused_block", INT32, ONE, (TRT_LLMAPI,), "As `kv_cache_reused_blocks`.", _PERF),
    OutputSpec("kv_cache_missed_block", INT32, ONE, (TRT_LLMAPI,), "As `kv_cache_alloc_new_blocks`.", _PERF),
    OutputSpec("kv_cache_hit_rate", FP32, ONE, (TRT_LLMAPI,), "Share of the sequence's blocks that were found.", _PERF),
    OutputSpec("arrival_time_ns", INT64, ONE, TRT_ALL, "When the request arrived; all times are nanoseconds of the wall clock.", _PERF),
    OutputSpec("first_scheduled_time_ns", INT64, ONE, TRT_ALL, "When its first step began.", _PERF),
    OutputSpec("first_token_time_ns", INT64, ONE, TRT_ALL, "When its first token was made.", _PERF),
    OutputSpec("last_token_time_ns", INT64, ONE, TRT_ALL, "When its latest token was made.", _PERF),
    OutputSpec("acceptance_rate", FP32, ONE, TRT_ALL, "Share of drafted tokens that were accepted; 0 without drafts.", _PERF),
    OutputSpec("total_accepted_draft_tokens", INT32, ONE, TRT_ALL, "Drafted tokens accepted so far.", _PERF),
    OutputSpec("total_draft_tokens", INT32, ONE, TRT_ALL, "Tokens drafted so far.", _PERF),
)  # fmt: skip
