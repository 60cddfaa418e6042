"""The tensors of the tasks `tokenize` (TensorRT-LLM's `preprocessing`) and `detokenize` (its `postprocessing`).

A table and nothing else; engine/tokenize_tasks.py does the work. dims are those of TensorRT-LLM without the batch.
"""

# ruff: noqa: E501  (one row, one line)
from __future__ import annotations

from slipstream.core.contract_origins import SLIPSTREAM, TRT_POSTPROCESSING, TRT_PREPROCESSING
from slipstream.core.wire_messages import DataType
from slipstream.protocol.tensor_spec import InputSpec, OutputSpec, Use

BOOL, BYTES, FP32 = DataType.BOOL, DataType.BYTES, DataType.FP32
INT32, UINT8, UINT64 = DataType.INT32, DataType.UINT8, DataType.UINT64
ONE = (1,)
ANY = (-1,)
PRE = (TRT_PREPROCESSING,)
POST = (TRT_POSTPROCESSING,)


def _neutral(name: str, dtype: DataType, dims: tuple[int, ...], reason: str, *values: object) -> InputSpec:
    doc = "Declared for clients that send it; not served."
    return InputSpec(name, dtype, dims, "", PRE, doc, use=Use.NEUTRAL_ONLY, neutral=values, reason=reason)


TOKENIZE_INPUTS = (
    InputSpec("QUERY", BYTES, ONE, "query", PRE, "The prompt, UTF-8.", is_optional=False),
    InputSpec("REQUEST_OUTPUT_LEN", INT32, ONE, "request_output_len", PRE, "Passed on."),
    InputSpec("BAD_WORDS_DICT", BYTES, ANY, "bad_words", PRE, "Words never to be generated."),
    InputSpec("STOP_WORDS_DICT", BYTES, ANY, "stop_words", PRE, "Words that end the output, as tokens."),
    InputSpec("EMBEDDING_BIAS_WORDS", BYTES, ANY, "bias_words", PRE, "Words whose tokens get a logit bias."),
    InputSpec("EMBEDDING_BIAS_WEIGHTS", FP32, ANY, "bias_weights", PRE, "One bias per word."),
    InputSpec("END_ID", INT32, ONE, "end_id", PRE, "Passed on; the tokenizer's end token when absent."),
    InputSpec("PAD_ID", INT32, ONE, "pad_id", PRE, "Passed on; the end token when absent."),
    InputSpec("ADD_SPECIAL_TOKENS", BOOL, ONE, "add_special_tokens", (SLIPSTREAM,), "Whether the tokenizer adds its special tokens; the model's `add_special_tokens` when absent."),
    _neutral("DECODER_QUERY", BYTES, ONE, "the model has no encoder", ""),
    _neutral("PROMPT_TABLE_EXTRA_ID", UINT64, ONE, "prompt tuning tables are not served", 0),
    _neutral("IMAGE_BYTES", UINT8, (-1, -1, -1, -1), "this is a text model"),
    _neutral("IMAGE_URL", BYTES, ANY, "this is a text model", ""),
    _neutral("VIDEO_BYTES", UINT8, (-1, -1, -1, -1), "this is a text model"),
)  # fmt: skip

TOKENIZE_OUTPUTS = (
    OutputSpec("INPUT_ID", INT32, ANY, PRE, "[n]: token ids of the prompt."),
    OutputSpec("REQUEST_INPUT_LEN", INT32, ONE, PRE, "n."),
    OutputSpec("DECODER_INPUT_ID", INT32, ANY, PRE, "Empty: the model has no encoder."),
    OutputSpec("REQUEST_DECODER_INPUT_LEN", INT32, ONE, PRE, "0."),
    OutputSpec("BAD_WORDS_IDS", INT32, (2, -1), PRE, "Row 0 the ids of all words, row 1 the end offset of each word, -1 pads."),
    OutputSpec("STOP_WORDS_IDS", INT32, (2, -1), PRE, "Laid out like `BAD_WORDS_IDS`."),
    OutputSpec("EMBEDDING_BIAS", FP32, ANY, PRE, "A bias per token of the vocabulary; empty without bias words."),
    OutputSpec("REQUEST_OUTPUT_LEN", INT32, ANY, PRE, "[1]: the input of that name; the model's `default_max_tokens` when absent."),
    OutputSpec("OUT_END_ID", INT32, ONE, PRE, "END_ID, or the tokenizer's end token, or -1."),
    OutputSpec("OUT_PAD_ID", INT32, ONE, PRE, "PAD_ID, or the end token, or -1."),
)  # fmt: skip

DETOKENIZE_INPUTS = (
    InputSpec("TOKENS_BATCH", INT32, (-1, -1), "tokens", POST, "[rows, n]: token ids; one text per row.", is_optional=False),
    InputSpec("SEQUENCE_LENGTH", INT32, ANY, "lengths", POST, "[rows]: tokens of each row that count; all when absent."),
    InputSpec("CONTEXT_TOKENS", INT32, ANY, "context", (SLIPSTREAM,), "Tokens that came before (`context_ids`): the text is what TOKENS_BATCH adds to theirs."),
    InputSpec("TEXT_LENGTH", INT32, ONE, "text_length", (SLIPSTREAM,), "Characters to return (`text_length`). Without it an incomplete character at the end is left out."),
    InputSpec("SKIP_SPECIAL_TOKENS", BOOL, ONE, "skip_special_tokens", (SLIPSTREAM,), "The model's `skip_special_tokens` when absent."),
    InputSpec("REQUEST_HANDLE", UINT64, ONE, "request_handle", (SLIPSTREAM,), "The request that the tokens are of (`request_handle`), which ends when this one arrives cancelled. Any other number does nothing."),
)  # fmt: skip

DETOKENIZE_OUTPUTS = (OutputSpec("OUTPUT", BYTES, ANY, POST, "[rows]: the texts."),)
