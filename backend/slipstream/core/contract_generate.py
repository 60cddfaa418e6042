"""The tensors of the `generate` task: the vLLM backend's, TensorRT-LLM's where they apply, and a few of our own.

A table and nothing else: contract.py makes declarations and documentation of it, client_settings.py reads requests by it.
dims are those of the origin without the batch dimension.
"""

# ruff: noqa: E501  (one row, one line)
from __future__ import annotations

from slipstream.core.tensor_spec import (
    SLIPSTREAM,
    TRT_CORE,
    TRT_ENSEMBLE,
    TRT_LLMAPI,
    VLLM,
    InputSpec,
    OutputSpec,
    Use,
)
from slipstream.core.wire_messages import DataType

BOOL, BYTES, FP16, FP32 = DataType.BOOL, DataType.BYTES, DataType.FP16, DataType.FP32
INT32, INT64, UINT8, UINT32, UINT64 = DataType.INT32, DataType.INT64, DataType.UINT8, DataType.UINT32, DataType.UINT64

ONE = (1,)
ANY = (-1,)
TRT = (TRT_ENSEMBLE, TRT_CORE)
TRT_ALL = (TRT_ENSEMBLE, TRT_CORE, TRT_LLMAPI)


def _neutral(
    name: str, dtype: DataType, dims: tuple[int, ...], origins: tuple[str, ...], reason: str, *values: object
) -> InputSpec:
    doc = "Declared for clients that send it; not served."
    return InputSpec(name, dtype, dims, "", origins, doc, use=Use.NEUTRAL_ONLY, neutral=values, reason=reason)


_PROMPT = (
    InputSpec("text_input", BYTES, ONE, "prompt", (VLLM, TRT_ENSEMBLE, TRT_LLMAPI), "The prompt, UTF-8. This or `input_ids`, not both."),
    InputSpec("input_ids", INT32, ANY, "prompt_token_ids", (TRT_CORE,), "The prompt as token ids, used as they are: nothing is put in front."),
    InputSpec("input_lengths", INT32, ONE, "prompt_length", (TRT_CORE,), "Number of leading `input_ids` that are the prompt (padding follows); all when absent."),
    InputSpec("sampling_parameters", BYTES, ONE, "sampling_parameters", (VLLM,), "A JSON object of settings, by the names of the table of settings."),
    InputSpec("add_special_tokens", BOOL, ONE, "add_special_tokens", (SLIPSTREAM,), "Whether the tokenizer puts its special tokens around `text_input`."),
)  # fmt: skip

_LENGTH = (
    InputSpec("max_tokens", INT32, ONE, "max_tokens", (TRT_ENSEMBLE,), "Most tokens to generate."),
    InputSpec("request_output_len", INT32, ONE, "max_tokens", (TRT_CORE,), "Same as `max_tokens`."),
    InputSpec("sampling_param_max_tokens", INT32, ONE, "max_tokens", (TRT_LLMAPI,), "Same as `max_tokens`."),
    InputSpec("min_tokens", INT32, ONE, "min_tokens", TRT, "Fewest tokens before an end token or stop string counts."),
    InputSpec("end_id", INT32, ONE, "end_id", TRT, "The end token, in place of the checkpoint's; -1 for none."),
    InputSpec("pad_id", INT32, ONE, "", TRT, "Accepted; nothing is padded here.", use=Use.WITHOUT_EFFECT),
    InputSpec("stop_words", BYTES, ANY, "stop", (TRT_ENSEMBLE,), "Stop strings, matched on the text; the output ends before the first one complete."),
    InputSpec("sampling_param_stop", BYTES, ANY, "stop", (TRT_LLMAPI,), "Same as `stop_words`."),
    InputSpec("stop_words_list", INT32, (2, -1), "stop_words_ids", (TRT_CORE,), "Stop words as token ids: row 0 all ids, row 1 the end offset of each word, -1 pads."),
    InputSpec("bad_words", BYTES, ANY, "bad_words", (TRT_ENSEMBLE,), "Words never to be generated."),
    InputSpec("bad_words_list", INT32, (2, -1), "bad_words_ids", (TRT_CORE,), "Bad words as token ids, laid out like `stop_words_list`."),
    InputSpec("ignore_eos", BOOL, ONE, "ignore_eos", (SLIPSTREAM,), "Go on past the end token."),
    InputSpec("include_stop_str_in_output", BOOL, ONE, "include_stop_str_in_output", (SLIPSTREAM,), "Keep the stop string, or the text of the stop token, in the output."),
    InputSpec("skip_special_tokens", BOOL, ONE, "skip_special_tokens", (SLIPSTREAM,), "Leave special tokens out of the text (the default)."),
)  # fmt: skip

_SAMPLING = (
    InputSpec("temperature", FP32, ONE, "temperature", TRT, "0 is greedy."),
    InputSpec("sampling_param_temperature", FP32, ONE, "temperature", (TRT_LLMAPI,), "Same as `temperature`."),
    InputSpec("top_k", INT32, ONE, "top_k", (TRT_ENSEMBLE,), "Sample of the k likeliest tokens; 0 or -1 for all."),
    InputSpec("runtime_top_k", INT32, ONE, "top_k", (TRT_CORE,), "Same as `top_k`."),
    InputSpec("sampling_param_top_k", INT32, ONE, "top_k", (TRT_LLMAPI,), "Same as `top_k`."),
    InputSpec("top_p", FP32, ONE, "top_p", (TRT_ENSEMBLE,), "Sample of the likeliest tokens of this total probability. 0 as TensorRT-LLM has it: off, and greedy unless `top_k` is given."),
    InputSpec("runtime_top_p", FP32, ONE, "top_p", (TRT_CORE,), "Same as `top_p`."),
    InputSpec("sampling_param_top_p", FP32, ONE, "top_p", (TRT_LLMAPI,), "Same as `top_p`."),
    InputSpec("min_p", FP32, ONE, "min_p", (SLIPSTREAM,), "Drop tokens less likely than this share of the likeliest one."),
    InputSpec("repetition_penalty", FP32, ONE, "repetition_penalty", TRT, "Above 1 makes tokens of prompt and output less likely."),
    InputSpec("presence_penalty", FP32, ONE, "presence_penalty", TRT, "Subtracted from the logit of tokens of the output."),
    InputSpec("sampling_param_presence_penalty", FP32, ONE, "presence_penalty", (TRT_LLMAPI,), "Same as `presence_penalty`."),
    InputSpec("frequency_penalty", FP32, ONE, "frequency_penalty", TRT, "Subtracted once per occurrence in the output."),
    InputSpec("sampling_param_frequency_penalty", FP32, ONE, "frequency_penalty", (TRT_LLMAPI,), "Same as `frequency_penalty`."),
    InputSpec("seed", UINT64, ONE, "seed", TRT, "Same seed, same text, whatever else is in the batch."),
    InputSpec("random_seed", UINT64, ONE, "seed", TRT, "Same as `seed` (its name in older releases)."),
    InputSpec("sampling_param_seed", UINT64, ONE, "seed", (TRT_LLMAPI,), "Same as `seed`."),
    InputSpec("num_return_sequences", INT32, ONE, "n", TRT, "Sequences to generate; they share the prompt's cache."),
    InputSpec("sampling_param_best_of", INT32, ONE, "best_of", (TRT_LLMAPI,), "Accepted when equal to the number of sequences returned."),
    InputSpec("embedding_bias_words", BYTES, ANY, "bias_words", (TRT_ENSEMBLE,), "Words whose tokens get the bias of `embedding_bias_weights`."),
    InputSpec("embedding_bias_weights", FP32, ANY, "bias_weights", (TRT_ENSEMBLE,), "One logit bias per entry of `embedding_bias_words`."),
    InputSpec("embedding_bias", FP32, ANY, "bias_vector", (TRT_CORE,), "A logit bias per token of the vocabulary; zeros change nothing."),
    InputSpec("num_draft_tokens", INT32, ONE, "num_draft_tokens", (TRT_ENSEMBLE,), "Drafts per step, where the model speculates; 0 for none. At most the model's `num_draft_tokens`."),
    InputSpec("speculative_method", BYTES, ONE, "speculative_method", (SLIPSTREAM,), "One of the methods that the model has loaded, or `none`; default the first."),
    InputSpec("speculative_acceptance", BYTES, ONE, "speculative_acceptance", (SLIPSTREAM,), "`exact`, `rejection`, `typical` or `top_p_window`; the last two change the distribution."),
    InputSpec("reference_text", BYTES, ONE, "reference_text", (SLIPSTREAM,), "A text that the output is expected to repeat parts of, for drafts by `ngram`."),
    InputSpec("reference_ids", INT32, ANY, "reference_ids", (SLIPSTREAM,), "The same as token ids."),
    InputSpec("guided_decoding_guide_type", BYTES, ONE, "guide_type", TRT, "`json`, `json_schema`, `regex` or `ebnf_grammar`."),
    InputSpec("guided_decoding_guide", BYTES, ONE, "guide_text", TRT, "The schema, expression or grammar."),
)  # fmt: skip

_SERVING = (
    InputSpec("stream", BOOL, ONE, "stream", (VLLM, TRT_ENSEMBLE), "Send text as it is made; else in one response."),
    InputSpec("streaming", BOOL, ONE, "stream", (TRT_CORE, TRT_LLMAPI), "Same as `stream`."),
    InputSpec("stream_interval", INT32, ONE, "stream_interval", (SLIPSTREAM,), "Tokens per response when streaming; the first leaves at once."),
    InputSpec("exclude_input_in_output", BOOL, ONE, "exclude_input_in_output", (VLLM, *TRT), "Leave the prompt out of the output. Without it: echoed unless streaming. False with streaming is an error."),
    InputSpec("sampling_param_exclude_input_from_output", BOOL, ONE, "exclude_input_in_output", (TRT_LLMAPI,), "Same as `exclude_input_in_output`."),
    InputSpec("stop", BOOL, ONE, "stop_request", (TRT_CORE, TRT_LLMAPI), "True: end the running request that has this request's id, where `stop_by_request_id` allows it. Nothing else is needed."),
    InputSpec("priority", INT32, ONE, "priority", (SLIPSTREAM,), "Lower runs first; default 0. A waiting request gains a level every `priority_aging_s` of the model."),
    InputSpec("cache_salt", BYTES, ONE, "cache_salt", (SLIPSTREAM,), "Cached blocks are shared only with requests of the same salt, so that others cannot learn from `kv_cache_reused_blocks` or from timing that a prompt was seen before. Secret to those who may share; at most 256 bytes, empty for none."),
    InputSpec("timeout_ms", INT32, ONE, "timeout_ms", (SLIPSTREAM,), "The request ends with finish_reason `timeout` after so long; 0 for none. Also Triton's own request timeout."),
)  # fmt: skip

_FLAGS = (
    InputSpec("return_finish_reason", BOOL, ONE, "return_finish_reason", (VLLM, TRT_LLMAPI), "Send `finish_reason`."),
    InputSpec("return_stop_reason", BOOL, ONE, "return_stop_reason", (TRT_LLMAPI,), "Send `stop_reason`."),
    InputSpec("return_cumulative_logprob", BOOL, ONE, "return_cumulative_logprob", (VLLM, TRT_LLMAPI), "Send `cumulative_logprob`."),
    InputSpec("return_logprobs", BOOL, ONE, "return_logprobs", (VLLM,), "Send `logprobs`; how many alternatives, the setting `logprobs` says."),
    InputSpec("return_prompt_logprobs", BOOL, ONE, "return_prompt_logprobs", (SLIPSTREAM,), "Send `prompt_logprobs`, likewise."),
    InputSpec("return_num_input_tokens", BOOL, ONE, "return_num_input_tokens", (VLLM,), "Send `num_input_tokens`."),
    InputSpec("return_num_output_tokens", BOOL, ONE, "return_num_output_tokens", (VLLM,), "Send `num_output_tokens`."),
    InputSpec("return_log_probs", BOOL, ONE, "return_log_probs", TRT, "Send `cum_log_probs` and `output_log_probs`."),
    InputSpec("return_output_ids", BOOL, ONE, "return_output_ids", (SLIPSTREAM,), "Send `output_ids` and `sequence_length`."),
    InputSpec("return_perf_metrics", BOOL, ONE, "return_perf_metrics", TRT, "Send the cache, timing and speculation outputs."),
    InputSpec("sampling_param_return_perf_metrics", BOOL, ONE, "return_perf_metrics", (TRT_LLMAPI,), "Same as `return_perf_metrics`."),
)  # fmt: skip

_NO_BEAMS = "there is no beam search"
_NO_LORA = "LoRA adapters are not served"
_NO_IMAGE = "this is a text model"
_NO_DRAFT = "drafts are made by the server, not sent by clients"
_NO_ENCODER = "the model has no encoder"
_NO_TABLE = "prompt tuning tables are not served"
_NO_RETENTION = "the prefix cache keeps the most recently used blocks and takes no hints"
_NO_LOGITS = "raw logits are not served; use logprobs"
_NO_LOOKAHEAD = "lookahead decoding is not served"

_NOT_SERVED = (
    _neutral("beam_width", INT32, ONE, TRT, _NO_BEAMS, 0, 1),
    _neutral("length_penalty", FP32, ONE, (TRT_ENSEMBLE,), _NO_BEAMS, 0.0, 1.0),
    _neutral("len_penalty", FP32, ONE, (TRT_CORE,), _NO_BEAMS, 0.0, 1.0),
    _neutral("early_stopping", BOOL, ONE, (TRT_CORE,), _NO_BEAMS, False),
    _neutral("beam_search_diversity_rate", FP32, ONE, (TRT_CORE,), _NO_BEAMS, 0.0),
    _neutral("runtime_top_p_min", FP32, ONE, (TRT_CORE,), "top_p does not decay", 0.0, 1e-6),
    _neutral("runtime_top_p_decay", FP32, ONE, (TRT_CORE,), "top_p does not decay", 0.0, 1.0),
    _neutral("runtime_top_p_reset_ids", INT32, ONE, (TRT_CORE,), "top_p does not decay", -1),
    _neutral("return_context_logits", BOOL, ONE, TRT, _NO_LOGITS, False),
    _neutral("return_generation_logits", BOOL, ONE, TRT, _NO_LOGITS, False),
    _neutral("decoder_text_input", BYTES, ONE, (TRT_ENSEMBLE,), _NO_ENCODER, ""),
    _neutral("decoder_input_ids", INT32, ANY, (TRT_CORE,), _NO_ENCODER),
    _neutral("decoder_input_lengths", INT32, ONE, (TRT_CORE,), _NO_ENCODER, 0),
    _neutral("draft_input_ids", INT32, ANY, (TRT_CORE,), _NO_DRAFT),
    _neutral("draft_logits", FP32, (-1, -1), (TRT_CORE,), _NO_DRAFT),
    _neutral("draft_acceptance_threshold", FP32, ONE, (TRT_CORE,), _NO_DRAFT, 0.0),
    _neutral("use_draft_logits", BOOL, ONE, (TRT_ENSEMBLE,), _NO_DRAFT, False),
    _neutral("prompt_embedding_table", FP16, (-1, -1), TRT, _NO_TABLE),
    _neutral("prompt_table_extra_id", UINT64, ONE, TRT, _NO_TABLE, 0),
    _neutral("prompt_table_extra_ids", UINT64, ANY, (TRT_CORE,), _NO_TABLE, 0),
    _neutral("prompt_vocab_size", INT32, ONE, TRT, _NO_TABLE, 0),
    _neutral("lora_task_id", UINT64, ONE, TRT, _NO_LORA, 0),
    _neutral("lora_weights", FP16, (-1, -1), TRT, _NO_LORA),
    _neutral("lora_config", INT32, (-1, 3), TRT, _NO_LORA),
    _neutral("lora_id", INT32, ONE, (TRT_LLMAPI,), _NO_LORA, 0),
    _neutral("lora_name", BYTES, ONE, (TRT_LLMAPI,), _NO_LORA, ""),
    _neutral("lora_path", BYTES, ONE, (TRT_LLMAPI,), _NO_LORA, ""),
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

INPUTS = (*_PROMPT, *_LENGTH, *_SAMPLING, *_SERVING, *_FLAGS, *_NOT_SERVED)

_PERF = "return_perf_metrics"
_IDS = "return_output_ids"

OUTPUTS = (
    OutputSpec("text_output", BYTES, ANY, (VLLM, TRT_ENSEMBLE, TRT_LLMAPI), "The text: one string, or n in one response; when streaming, what is new."),
    OutputSpec("finish_reason", BYTES, ANY, (VLLM, TRT_LLMAPI), "`stop`, `length`, `cancelled` or `timeout` with a sequence's last response, else empty.", "return_finish_reason"),
    OutputSpec("stop_reason", BYTES, ANY, (TRT_LLMAPI,), "The stop string, or the number of the stop token, that ended the sequence, else empty.", "return_stop_reason"),
    OutputSpec("cumulative_logprob", FP32, ANY, (VLLM, TRT_LLMAPI), "Sum of the log-probabilities of the sequence so far.", "return_cumulative_logprob"),
    OutputSpec("logprobs", BYTES, ANY, (VLLM,), 'JSON, per new token: {"id": {"logprob", "rank", "decoded_token"}, ...}, the chosen token first.', "return_logprobs"),
    OutputSpec("prompt_logprobs", BYTES, ANY, (SLIPSTREAM,), "The same per prompt token, null for the first; with the first response, then `null`.", "return_prompt_logprobs"),
    OutputSpec("num_input_tokens", UINT32, ONE, (VLLM,), "Tokens of the prompt.", "return_num_input_tokens"),
    OutputSpec("num_output_tokens", UINT32, ANY, (VLLM,), "Tokens of this response; their sum over a stream is the total.", "return_num_output_tokens"),
    OutputSpec("output_ids", INT32, (-1, -1), (TRT_CORE,), "[1, n]: the token ids of this response, after the prompt's when that is echoed.", _IDS),
    OutputSpec("sequence_length", INT32, ANY, (TRT_CORE,), "[1]: number of `output_ids`.", _IDS),
    OutputSpec("context_ids", INT32, ANY, (SLIPSTREAM,), "Tokens before `output_ids` that a stateless decoder needs (CONTEXT_TOKENS of `postprocessing`)."),
    OutputSpec("text_length", INT32, ONE, (SLIPSTREAM,), "Characters of `text_output` (TEXT_LENGTH of `postprocessing`)."),
    OutputSpec("request_handle", UINT64, ONE, (SLIPSTREAM,), "The server's number of the request: random, and the right to cancel it through `postprocessing`; keep it secret."),
    OutputSpec("cum_log_probs", FP32, ANY, TRT, "[1]: as `cumulative_logprob`.", "return_log_probs"),
    OutputSpec("output_log_probs", FP32, (-1, -1), TRT, "[1, n]: log-probability of each new token.", "return_log_probs"),
    OutputSpec("context_logits", FP32, (-1, -1), TRT, "Always empty; asking with `return_context_logits` is an error.", reason=_NO_LOGITS),
    OutputSpec("generation_logits", FP32, (-1, -1, -1), TRT, "Always empty; asking with `return_generation_logits` is an error.", reason=_NO_LOGITS),
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
