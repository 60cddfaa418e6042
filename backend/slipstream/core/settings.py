"""Everything that a request may set: one row per setting, whichever way it comes.

A table and nothing else. By it client_settings.py reads and checks tensors, request parameters and JSON,
contract_generate.py declares the tensors, sampling_params.py takes its defaults and checks what a library's user gives,
server/schemas.py makes the fields of OpenAI's requests, build/make_docs.py writes docs/contracts.md and gateway.md.
"""

# ruff: noqa: E501  (one row, one line)
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.core.config import ACCEPTANCES, NO_SPECULATION
from slipstream.core.contract_origins import SLIPSTREAM, TRT_CORE, TRT_ENSEMBLE, TRT_LLMAPI, VLLM
from slipstream.core.control import COMMANDS, MAX_FOLDER_BYTES, MODES
from slipstream.core.draft_methods import DRAFT_METHODS
from slipstream.core.setting_kinds import (
    Biases,
    Choice,
    Flag,
    Integer,
    Kind,
    Number,
    Numbers,
    Object,
    Processors,
    Text,
    Texts,
    TokenBiases,
    TokenIds,
    WordsIds,
)
from slipstream.core.setting_values import MAX_INT32
from slipstream.core.wire_messages import DataType

Origins = tuple[str, ...]
TRT = (TRT_ENSEMBLE, TRT_CORE)
OURS = (SLIPSTREAM,)
MAX_BIAS = 100.0  # of one token's logit, either way
MAX_CACHE_SALT_BYTES = 256
MAX_LORA_NAME_BYTES = 256
MAX_LOGPROB_TOKENS = 128  # of logprob_token_ids: vLLM's own bound
MAX_CHOICES = 128
MAX_BEAMS = 64  # whatever a model's max_beam_width
MAX_REQUEST_ID_BYTES = 1024  # as of the id that is not a parameter, kMaxRequestIdBytes
MAX_TIMEOUT_US = 2**63 - 1
NUM_LOGPROBS = Integer(-1, words=f"an integer from 0 to {MAX_INT32}, or -1 for the whole vocabulary")
GUIDE_TYPES = ("json", "json_schema", "regex", "ebnf_grammar", "structural_tag")

# what `openai` of a setting may be besides names of the gateway's own fields
PASSED_ON = "a field of the same name, passed on as it is"
IN_SPECULATION = "a key of the object `speculation`, passed on as it is"


@dataclass(frozen=True)
class Setting:
    """One setting of a request.

    name: its one name inside; a field of that name in SamplingParams is it. kind: type and bounds.
    default: what holds where no source says it; parameter: the one of config.pbtxt that says otherwise.
    tensors: the input tensors that set it, and whose clients send each. A tensor's name is also a request parameter and,
    if is_in_json, a key of `sampling_parameters`. json: names of both that no tensor of this setting has; parameters:
    names of request parameters alone.
    openai: PASSED_ON, IN_SPECULATION, or the fields by which requests to the gateway say it, which server/ reads itself.
    """

    name: str
    kind: Kind
    default: object
    doc: str
    tensors: Mapping[str, Origins] = field(default_factory=dict)
    json: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    is_in_json: bool = True
    openai: str = ""
    parameter: str = ""


_PROMPT = (
    Setting("prompt", Text(), None, "The prompt, UTF-8. This or `input_ids`, not both.", {"text_input": (VLLM, TRT_ENSEMBLE, TRT_LLMAPI)}, is_in_json=False),
    Setting("prompt_token_ids", TokenIds(is_text=True), None, "The prompt as token ids, used as they are: nothing is put in front.", {"input_ids": (TRT_CORE,)}, is_in_json=False),
    Setting("prompt_length", Integer(), None, "Number of leading `input_ids` that are the prompt (padding follows); all when absent.", {"input_lengths": (TRT_CORE,)}, is_in_json=False),
    Setting("truncate_prompt_tokens", Integer(-1, words=f"an integer from 1 to {MAX_INT32}, or -1 for `max_model_len` less `max_tokens`"), None, "Keep only the last tokens of the prompt, and those that the tokenizer puts in front. A long text is first cut to 16 characters per token kept.", {"truncate_prompt_tokens": OURS}, openai=PASSED_ON),
    Setting("prompt_table", Numbers(DataType.FP16), None, "Embeddings of prompt tokens: `input_ids` from the vocabulary's size on are its rows ([prompt tuning](clients.md#prompt-tuning)).", {"prompt_embedding_table": TRT}, is_in_json=False),
    Setting("prompt_table_size", Integer(0), 0, "Rows of `prompt_embedding_table` that count; 0: all.", {"prompt_vocab_size": TRT}, is_in_json=False),
    Setting("sampling_parameters", Object(), None, "A JSON object of settings, by the names of the table of settings.", {"sampling_parameters": (VLLM,)}, is_in_json=False),
    Setting("add_special_tokens", Flag(), True, "Whether the tokenizer puts its special tokens around `text_input`.", {"add_special_tokens": OURS}, openai="`add_special_tokens` of completions", parameter="add_special_tokens"),
)  # fmt: skip

_LENGTH = (
    Setting("max_tokens", Integer(1), 16, "Most tokens to generate.", {"max_tokens": (TRT_ENSEMBLE,), "request_output_len": (TRT_CORE,), "sampling_param_max_tokens": (TRT_LLMAPI,)}, openai="`max_tokens`, `max_completion_tokens`", parameter="default_max_tokens"),
    Setting("min_tokens", Integer(0), 0, "End tokens and stop strings count only after this many tokens.", {"min_tokens": TRT}, openai=PASSED_ON),
    Setting("end_id", Integer(-1, words=f"a token id from 0 to {MAX_INT32}, or -1 for none"), None, "The end token, in place of the checkpoint's; -1 for none.", {"end_id": TRT}),
    Setting("stop", Texts(), (), "Stop strings, matched on the text; the output ends before the first one complete.", {"stop_words": (TRT_ENSEMBLE,), "sampling_param_stop": (TRT_LLMAPI,)}, json=("stop",), openai="`stop`"),
    Setting("stop_token_ids", TokenIds(), (), "Token ids that end the output.", json=("stop_token_ids",), openai=PASSED_ON),
    Setting("stop_words_ids", WordsIds(), (), "Stop words as token ids: row 0 all ids, row 1 the end offset of each word, -1 pads.", {"stop_words_list": (TRT_CORE,)}),
    Setting("bad_words", Texts(), (), "Words that are never generated.", {"bad_words": (TRT_ENSEMBLE,)}, openai=PASSED_ON),
    Setting("bad_words_ids", WordsIds(), (), "Bad words as token ids, laid out like `stop_words_list`.", {"bad_words_list": (TRT_CORE,)}),
    Setting("allowed_token_ids", TokenIds(is_empty_accepted=False), None, "The only tokens that may be generated. End tokens have to be listed too.", {"allowed_token_ids": OURS}, openai=PASSED_ON),
    Setting("ignore_eos", Flag(), False, "Continue after the end token.", {"ignore_eos": OURS}, openai=PASSED_ON),
    Setting("include_stop_str_in_output", Flag(), False, "Keep the stop string, or the text of the stop token, in the output.", {"include_stop_str_in_output": OURS}, openai=PASSED_ON),
    Setting("detokenize", Flag(), True, "Make text of the tokens. Without it outputs have token ids alone, and stop strings are refused.", {"detokenize": OURS}, openai=PASSED_ON),
    Setting("skip_special_tokens", Flag(), True, "Leave special tokens out of the text (the default).", {"skip_special_tokens": OURS}, openai=PASSED_ON, parameter="skip_special_tokens"),
)  # fmt: skip

_SAMPLING = (
    Setting("temperature", Number(0.0, 100.0, "a number from 0 (greedy) to 100"), 1.0, "0 is greedy.", {"temperature": TRT, "sampling_param_temperature": (TRT_LLMAPI,)}, openai=PASSED_ON, parameter="default_temperature"),
    Setting("top_k", Integer(-1, words=f"an integer from 1 to {MAX_INT32}, or 0 or -1 for all tokens"), 0, "Sample from the k likeliest tokens; 0 or -1: from all.", {"top_k": (TRT_ENSEMBLE,), "runtime_top_k": (TRT_CORE,), "sampling_param_top_k": (TRT_LLMAPI,)}, openai=PASSED_ON),
    Setting("top_p", Number(0.0, 1.0), 1.0, "Sample from the likeliest tokens with this total probability. 0, as in TensorRT-LLM: off, and greedy unless `top_k` is given.", {"top_p": (TRT_ENSEMBLE,), "runtime_top_p": (TRT_CORE,), "sampling_param_top_p": (TRT_LLMAPI,)}, openai=PASSED_ON),
    Setting("min_p", Number(0.0, 1.0), 0.0, "Drop tokens below this fraction of the likeliest token's probability.", {"min_p": OURS}, openai=PASSED_ON),
    Setting("repetition_penalty", Number(0.01, 10.0), 1.0, "Above 1: tokens of prompt and output become less likely.", {"repetition_penalty": TRT}, openai=PASSED_ON),
    Setting("presence_penalty", Number(-2.0, 2.0), 0.0, "Subtracted from the logit of tokens of the output.", {"presence_penalty": TRT, "sampling_param_presence_penalty": (TRT_LLMAPI,)}, openai=PASSED_ON),
    Setting("frequency_penalty", Number(-2.0, 2.0), 0.0, "Subtracted once per occurrence in the output.", {"frequency_penalty": TRT, "sampling_param_frequency_penalty": (TRT_LLMAPI,)}, openai=PASSED_ON),
    Setting("seed", Integer(-(2**63), 2**64 - 1, "a 64-bit integer"), None, "The same seed gives the same text, whatever else is in the batch. `random_seed` is the name in older releases.", {"seed": TRT, "random_seed": TRT, "sampling_param_seed": (TRT_LLMAPI,)}, openai=PASSED_ON),
    Setting("n", Integer(1, MAX_CHOICES), 1, "Sequences to generate; they share the prompt's cache.", {"num_return_sequences": TRT}, json=("n",), openai=PASSED_ON),
    Setting("best_of", Integer(1, MAX_CHOICES), None, "Accepted when equal to the number of sequences returned.", {"sampling_param_best_of": (TRT_LLMAPI,)}, json=("best_of",), openai="`best_of` of completions"),
    Setting("beam_width", Integer(0, MAX_BEAMS), 0, "Above 1: beam search with this many beams, at most the model's `max_beam_width`. Without `num_return_sequences` all are returned, best first.", {"beam_width": TRT}),
    Setting("use_beam_search", Flag(), False, "Beam search with `n` beams.", json=("use_beam_search",), openai=PASSED_ON),
    Setting("length_penalty", Number(-10.0, 10.0), 1.0, "For beam search: a score is the log-probability divided by the number of tokens to this power. TensorRT-LLM's default is 0.", {"length_penalty": (TRT_ENSEMBLE,), "len_penalty": (TRT_CORE,)}, openai=PASSED_ON),
    Setting("early_stopping", Flag(), False, "For beam search: end as soon as there are `beam_width` results, without looking for better ones.", {"early_stopping": (TRT_CORE,)}, openai=PASSED_ON),
    Setting("logprobs", NUM_LOGPROBS, None, "Likeliest tokens to report beside each new one, at most the model's `max_logprobs`; 0 for the chosen one alone.", json=("logprobs",), openai="`logprobs`, `top_logprobs`"),
    Setting("prompt_logprobs", NUM_LOGPROBS, None, "The same for each token of the prompt.", json=("prompt_logprobs",), openai="`prompt_logprobs`; `echo` with `logprobs`"),
    Setting("logprob_token_ids", TokenIds(max_entries=MAX_LOGPROB_TOKENS), (), "Tokens to report beside each new one, likely or not; without a rank.", json=("logprob_token_ids",), openai=PASSED_ON),
    Setting("logit_bias", TokenBiases(MAX_BIAS), (), 'Added to the logits of tokens: an object {"token id": bias}.', json=("logit_bias",), openai=PASSED_ON),
    Setting("embedding_bias_words", Texts(has_empty=True), (), "Words whose tokens get the bias of `embedding_bias_weights`.", {"embedding_bias_words": (TRT_ENSEMBLE,)}),
    Setting("embedding_bias_weights", Biases(MAX_BIAS), (), "One logit bias per entry of `embedding_bias_words`.", {"embedding_bias_weights": (TRT_ENSEMBLE,)}),
    Setting("embedding_bias", Biases(MAX_BIAS), (), "A logit bias per token of the vocabulary; zeros change nothing.", {"embedding_bias": (TRT_CORE,)}),
    Setting("num_draft_tokens", Integer(0, words=f"an integer from 0 (no drafts) to {MAX_INT32}"), None, "Drafts per step, where the model speculates; 0 for none. At most the model's `num_draft_tokens`.", {"num_draft_tokens": (TRT_ENSEMBLE,)}, openai=IN_SPECULATION),
    Setting("speculative_method", Choice((*DRAFT_METHODS.names(), NO_SPECULATION)), None, "One of the methods that the model has loaded, or `none`; default the first.", {"speculative_method": OURS}, openai=IN_SPECULATION),
    Setting("speculative_acceptance", Choice(ACCEPTANCES), None, "`exact`, `rejection`, `typical` or `top_p_window`; the last two change the distribution.", {"speculative_acceptance": OURS}, openai=IN_SPECULATION, parameter="speculative_acceptance"),
    Setting("reference_text", Text(), None, "For `ngram`: a text that the output is expected to repeat in part.", {"reference_text": OURS}, openai=IN_SPECULATION),
    Setting("reference_ids", TokenIds(is_text=True), (), "`reference_text` as token ids.", {"reference_ids": OURS}, openai=IN_SPECULATION),
    Setting("guided_decoding_guide_type", Choice(GUIDE_TYPES), None, "`json`, `json_schema`, `regex`, `ebnf_grammar` or `structural_tag`.", {"guided_decoding_guide_type": TRT}),
    Setting("guided_decoding_guide", Text(), None, "The schema, expression or grammar.", {"guided_decoding_guide": TRT}),
    Setting("structured_outputs", Object(), None, "A grammar for the output: an object with one of `json`, `json_object`, `regex`, `grammar`, `choice` and `structural_tag`.", json=("structured_outputs", "guided_decoding"), openai=PASSED_ON),
    Setting("logits_processors", Processors(), (), "Classes of the operator that change the logits, by the names of the model's parameter `logits_processors`, and their arguments ([how](processors.md)).", json=("logits_processors", "logits_post_processor_name"), openai=PASSED_ON),
)  # fmt: skip

_SERVING = (
    Setting("stream", Flag(), False, "Stream the text; otherwise send one response.", {"stream": (VLLM, TRT_ENSEMBLE), "streaming": (TRT_CORE, TRT_LLMAPI)}, openai="`stream`"),
    Setting("stream_interval", Integer(1), 1, "Tokens per response when streaming; the first leaves at once.", {"stream_interval": OURS}, openai="`stream_interval`", parameter="stream_interval"),
    Setting("exclude_input_in_output", Flag(), None, "Leave the prompt out of the output. Unset: echoed unless streaming. False with streaming is an error.", {"exclude_input_in_output": (VLLM, *TRT), "sampling_param_exclude_input_from_output": (TRT_LLMAPI,)}, openai="`echo` of completions", parameter="exclude_input_in_output"),
    Setting("stop_request", Flag(), False, "True: end the running request that has this request's id, where `stop_by_request_id` allows it. Nothing else is needed.", {"stop": (TRT_CORE, TRT_LLMAPI)}, is_in_json=False),
    Setting("priority", Integer(-MAX_INT32 - 1), 0, "Lower runs first. A waiting request gains a level per `priority_aging_s` of the model.", {"priority": OURS}, openai=PASSED_ON),
    Setting("cache_salt", Text(MAX_CACHE_SALT_BYTES), "", "Only requests with the same salt share cached prefixes, so that others cannot detect a prompt by its cache hits. Keep it secret; at most 256 bytes, empty for none.", {"cache_salt": OURS}, openai=PASSED_ON),
    Setting("timeout_ms", Integer(0), 0, "After this time the request ends with finish_reason `timeout`; 0: none. Triton's own request timeout works too.", {"timeout_ms": OURS}, openai=PASSED_ON),
    Setting("control", Choice(COMMANDS), None, "A command to the model instead of a generation, where `enable_sleep_mode` allows it: `sleep`, `wake_up`, `reload_weights` or `is_sleeping`; or where `lora_root` does: `load_lora_adapter`, `unload_lora_adapter`; or `list_lora_adapters`. Nothing else is needed.", parameters=("control",), is_in_json=False),
    Setting("sleep_level", Integer(1, 2), 1, "For `sleep`: 1 keeps the weights in host memory, 2 frees them.", parameters=("sleep_level",), is_in_json=False),
    Setting("sleep_mode", Choice(MODES), "wait", "For `sleep` and `reload_weights`: `wait` for running requests, at most `drain_timeout_s`, or `abort` them.", parameters=("sleep_mode",), is_in_json=False),
    Setting("reload_folder", Text(MAX_FOLDER_BYTES), "", "For `reload_weights`: the checkpoint, below `reload_root`; none: the model's own.", parameters=("reload_folder",), is_in_json=False),
    Setting("lora_name", Text(MAX_LORA_NAME_BYTES), "", "The LoRA adapter to answer with, one of those that the model has loaded ([how](lora.md)); empty: none.", {"lora_name": (TRT_LLMAPI,)}, openai="`model`"),
    Setting("lora_task_id", Integer(0, 2**64 - 1, "an integer from 0 (none) to 2^64 - 1"), 0, "The client's own number of an adapter that it sends, or has sent, with the same `cache_salt`.", {"lora_task_id": TRT}, is_in_json=False),
    Setting("lora_weights", Numbers(DataType.FP16), None, "The adapter of `lora_task_id`, where `lora_cache_host_memory_bytes` allows it: a row a module, A then B. With the first request; later ones need the id alone.", {"lora_weights": TRT}, is_in_json=False),
    Setting("lora_config", Numbers(DataType.INT32, 3), None, "For `lora_weights`: TensorRT-LLM's module id, the layer and the rank of each row.", {"lora_config": TRT}, is_in_json=False),
    Setting("lora_path", Text(MAX_FOLDER_BYTES), "", "For `load_lora_adapter`: the adapter's folder, below the model's `lora_root`.", {"lora_path": (TRT_LLMAPI,)}, is_in_json=False),
    # Fields of Triton's own that HTTP `generate` (2.51) takes for parameters.
    Setting("timeout_us", Integer(0, MAX_TIMEOUT_US), 0, "Triton's request timeout, in microseconds.", parameters=("timeout",), is_in_json=False),
    Setting("request_id", Text(MAX_REQUEST_ID_BYTES), "", "Triton's request id.", parameters=("id", "request_id"), is_in_json=False),
)  # fmt: skip

_FLAGS = (
    Setting("return_finish_reason", Flag(), False, "Send `finish_reason`.", {"return_finish_reason": (VLLM, TRT_LLMAPI)}),
    Setting("return_stop_reason", Flag(), False, "Send `stop_reason`.", {"return_stop_reason": (TRT_LLMAPI,)}),
    Setting("return_cumulative_logprob", Flag(), False, "Send `cumulative_logprob`.", {"return_cumulative_logprob": (VLLM, TRT_LLMAPI)}),
    Setting("return_logprobs", Flag(), False, "Send `logprobs`; the setting `logprobs` gives the number of alternatives.", {"return_logprobs": (VLLM,)}),
    Setting("return_prompt_logprobs", Flag(), False, "Send `prompt_logprobs`, likewise.", {"return_prompt_logprobs": OURS}),
    Setting("return_num_input_tokens", Flag(), False, "Send `num_input_tokens`.", {"return_num_input_tokens": (VLLM,)}),
    Setting("return_num_output_tokens", Flag(), False, "Send `num_output_tokens`.", {"return_num_output_tokens": (VLLM,)}),
    Setting("return_log_probs", Flag(), False, "Send `cum_log_probs` and `output_log_probs`.", {"return_log_probs": TRT}),
    Setting("return_context_logits", Flag(), False, "Send `context_logits`, where the model's `max_logits_bytes` allows it.", {"return_context_logits": TRT}),
    Setting("return_generation_logits", Flag(), False, "Send `generation_logits`, likewise.", {"return_generation_logits": TRT}),
    Setting("return_output_ids", Flag(), False, "Send `output_ids` and `sequence_length`.", {"return_output_ids": OURS}),
    Setting("return_prompt_token_ids", Flag(), False, "Send `prompt_token_ids`.", {"return_prompt_token_ids": OURS}),
    Setting("return_perf_metrics", Flag(), False, "Send the cache, timing and speculation outputs.", {"return_perf_metrics": TRT, "sampling_param_return_perf_metrics": (TRT_LLMAPI,)}),
)  # fmt: skip

SETTINGS: tuple[Setting, ...] = (*_PROMPT, *_LENGTH, *_SAMPLING, *_SERVING, *_FLAGS)
BY_NAME = {setting.name: setting for setting in SETTINGS}
DEFAULTS: dict[str, Any] = {setting.name: setting.default for setting in SETTINGS}

# Fields of vLLM's SamplingParams that are not served and that no tensor has -> values accepted, why no others are.
KEYS_NOT_SERVED: dict[str, tuple[tuple[object, ...], str]] = {
    "spaces_between_special_tokens": ((True,), "special tokens are shown as they are"),
    "output_kind": ((), "`stream` says whether text comes in pieces"),
    "flat_logprobs": ((False,), "log-probabilities are JSON"),
    "skip_reading_prefix_cache": ((False,), "a `cache_salt` of its own keeps a request from cached prefixes"),
    "extra_args": (({},), "`logits_processors` has a processor's arguments"),
    "thinking_token_budget": ((), "the gateway knows what reasoning is, the engine does not"),
}
