"""The tasks `tokenize` and `detokenize`: TensorRT-LLM's preprocessing and postprocessing, one answer per request.

Stateless apart from the tokenizer; any thread. Imports neither torch nor transformers. Request parameters are passed
over, because an ensemble hands the client's to every step.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from slipstream.core.checkpoint_length import checkpoint_length
from slipstream.core.config import EngineConfig
from slipstream.core.errors import RequestError
from slipstream.core.setting_values import MAX_ENTRIES, check_list, refuse
from slipstream.core.settings import MAX_BIAS
from slipstream.nn.checkpoint_path import resolve_tokenizer
from slipstream.protocol import contract, wire
from slipstream.protocol.client_settings import check_neutral, unknown
from slipstream.protocol.prompts import check_prompt_bytes, encode_prompt
from slipstream.protocol.tensor_spec import TaskContract, Use
from slipstream.protocol.tensor_values import tensor_shape, tensor_values
from slipstream.tokenizer.detokenizer import decode_after
from slipstream.tokenizer.tokenizer import TextTokenizer

_END_TOKENS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<eos>")

MAX_UNTOLD_TOKENS = 1 << 20  # of a prompt where neither a parameter nor config.json says how many: 1.6 s, 0.3 GB
MAX_DECODED_LENGTHS = 2  # of a sequence as long as max_model_len, in one detokenize request

Encoded = tuple[tuple[int, ...], bytes]


class Task(Protocol):
    """outputs: for READY. answer: the one response of a request; raises RequestError, as check_size does before a large
    one is read."""

    @property
    def outputs(self) -> tuple[wire.OutputSpec, ...]: ...

    def check_size(self, raw: wire.Request) -> None: ...

    def answer(self, raw: wire.Request) -> bytes: ...


def make_task(config: EngineConfig) -> Task:
    """The task of this configuration, its tokenizer loaded. Raises ConfigError when there is none to load."""
    found = Path(resolve_tokenizer(config.model.tokenizer or config.model.model))
    tokenizer = TextTokenizer.load(found)
    folder = found if found.is_dir() else found.parent
    told = config.model.max_model_len or checkpoint_length(folder, config.model.rope_scaling)
    max_model_len = told or MAX_UNTOLD_TOKENS
    if config.task == "detokenize":
        return DetokenizeTask(config, tokenizer, max_model_len)
    return TokenizeTask(config, tokenizer, max_model_len)


class TokenizeTask:
    """QUERY -> INPUT_ID, and word lists in the [2, n] layout of `word_list`."""

    def __init__(self, config: EngineConfig, tokenizer: TextTokenizer, max_model_len: int = 0) -> None:
        """max_model_len: of the model that the ids are for, 0 if unknown."""
        self._config = config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        ids = (tokenizer.backend.token_to_id(token) for token in _END_TOKENS)
        self._end_id = next((token_id for token_id in ids if token_id is not None), -1)

    @property
    def outputs(self) -> tuple[wire.OutputSpec, ...]:
        return contract.OUTPUTS["tokenize"]

    def check_size(self, raw: wire.Request) -> None:
        for tensor in raw.inputs:
            if tensor.name == "QUERY" and self._max_model_len:
                check_prompt_bytes("QUERY", len(tensor.data) - 4, self._tokenizer, self._max_model_len)

    def answer(self, raw: wire.Request) -> bytes:
        given = _read(raw, contract.TOKENIZE, self._config)
        serving = self._config.serving
        add_special_tokens = given.get("add_special_tokens", serving.add_special_tokens)
        ids = encode_prompt("QUERY", given["query"], self._tokenizer, add_special_tokens, self._max_model_len)
        end_id = given.get("end_id", self._end_id)
        encoded: dict[str, Encoded] = {
            "INPUT_ID": _int32s(ids),
            "REQUEST_INPUT_LEN": _int32s([len(ids)]),
            "DECODER_INPUT_ID": _int32s([]),
            "REQUEST_DECODER_INPUT_LEN": _int32s([0]),
            "BAD_WORDS_IDS": self._words("BAD_WORDS_DICT", given.get("bad_words", ())),
            "STOP_WORDS_IDS": self._words("STOP_WORDS_DICT", given.get("stop_words", ())),
            "EMBEDDING_BIAS": self._bias(given.get("bias_words", ()), given.get("bias_weights", ())),
            "REQUEST_OUTPUT_LEN": _int32s([given.get("request_output_len", serving.default_max_tokens)]),
            "OUT_END_ID": _int32s([end_id]),
            "OUT_PAD_ID": _int32s([given.get("pad_id", end_id)]),
        }
        return _respond(raw, contract.TOKENIZE, encoded, self._config)

    def _words(self, name: str, words: Sequence[str]) -> Encoded:
        check_list(name, words)
        ids, offsets = word_list(self._tokenizer.encode_all([word for word in words if word]))
        return (2, len(ids)), struct.pack(f"<{2 * len(ids)}i", *ids, *offsets)

    def _bias(self, words: Sequence[str], weights: Sequence[float]) -> Encoded:
        check_list("EMBEDDING_BIAS_WORDS", words)
        if len(words) != len(weights):
            raise refuse("EMBEDDING_BIAS_WEIGHTS", list(weights), f"one number per word, {len(words)} in all")
        for weight in weights:
            if not abs(weight) <= MAX_BIAS:  # nor NaN
                raise refuse("EMBEDDING_BIAS_WEIGHTS", weight, f"numbers from -{MAX_BIAS} to {MAX_BIAS}")
        bias = [0.0] * (self._tokenizer.vocab_size if words else 0)
        for token_ids, weight in zip(self._tokenizer.encode_all(words), weights):
            for token_id in token_ids:
                bias[token_id] += weight
        return (len(bias),), struct.pack(f"<{len(bias)}f", *bias)


class DetokenizeTask:
    """TOKENS_BATCH -> OUTPUT; with CONTEXT_TOKENS and TEXT_LENGTH exact for the pieces of a stream."""

    def __init__(self, config: EngineConfig, tokenizer: TextTokenizer, max_model_len: int = 0) -> None:
        """max_model_len: of the model that the ids are from, 0 if unknown."""
        self._config = config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    @property
    def outputs(self) -> tuple[wire.OutputSpec, ...]:
        return contract.OUTPUTS["detokenize"]

    def check_size(self, raw: wire.Request) -> None:
        """All requests are decoded one after the other: no more than a prompt and its answer, with padding."""
        limit = MAX_DECODED_LENGTHS * self._max_model_len
        for tensor in raw.inputs:
            num_ids = math.prod(tensor.shape)
            if limit and num_ids > limit:
                accepted = f"at most {limit} ({MAX_DECODED_LENGTHS} x max_model_len={self._max_model_len})"
                raise RequestError(tensor.name, f"got {num_ids} token ids, accepted: {accepted}")

    def answer(self, raw: wire.Request) -> bytes:
        self.check_size(raw)
        given = _read(raw, contract.DETOKENIZE, self._config)
        rows = self._rows(raw, given)
        context, num_characters = given.get("context", []), given.get("text_length")
        if len(rows) != 1 and (context or num_characters is not None):
            raise RequestError("CONTEXT_TOKENS", f"given for {len(rows)} rows, accepted: one row of TOKENS_BATCH")
        if num_characters is not None and num_characters < 0:
            raise refuse("TEXT_LENGTH", num_characters, "a number of characters >= 0")
        is_skipping = given.get("skip_special_tokens", self._config.serving.skip_special_tokens)
        texts = [decode_after(self._tokenizer, context, row, is_skipping, num_characters) for row in rows]
        data = wire.bytes_tensor(text.encode("utf-8") for text in texts)
        return _respond(raw, contract.DETOKENIZE, {"OUTPUT": ((len(texts),), data)}, self._config)

    def _rows(self, raw: wire.Request, given: dict[str, Any]) -> list[list[int]]:
        """The token ids of each row that count."""
        tensor = next(tensor for tensor in raw.inputs if tensor.name == "TOKENS_BATCH")
        num_rows, width = tensor_shape(tensor, self._config.serving.max_batch_size > 0)
        if num_rows > MAX_ENTRIES:  # they may be empty, so that MAX_ELEMENTS does not bound them
            raise RequestError("TOKENS_BATCH", f"got {num_rows} rows, accepted: at most {MAX_ENTRIES}")
        tokens: list[int] = given["tokens"]
        lengths = given.get("lengths", [width] * num_rows)
        if len(lengths) != num_rows or any(not 0 <= length <= width for length in lengths):
            raise refuse("SEQUENCE_LENGTH", lengths, f"{num_rows} numbers from 0 to {width}")
        rows = [tokens[row * width : row * width + length] for row, length in enumerate(lengths)]
        for token_id in (token_id for row in [*rows, given.get("context", [])] for token_id in row):
            if token_id < 0:
                raise refuse("TOKENS_BATCH", token_id, "token ids >= 0 (SEQUENCE_LENGTH leaves padding out)")
        return rows


def word_list(words: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """TensorRT-LLM's two rows: the ids of all words one after the other, and each word's end offset; at least one wide.

    Ids are padded with 0, offsets with -1.
    """
    ids = [token_id for word in words for token_id in word]
    offsets, end = [], 0
    for word in words:
        end += len(word)
        if word:
            offsets.append(end)
    width = max(1, len(ids))
    return ids + [0] * (width - len(ids)), offsets + [-1] * (width - len(offsets))


def _read(raw: wire.Request, task: TaskContract, config: EngineConfig) -> dict[str, Any]:
    """Target -> value of the inputs given. Raises RequestError."""
    given: dict[str, Any] = {}
    for tensor in raw.inputs:
        spec = task.input(tensor.name)
        if spec is None:
            raise unknown(tensor.name, "input tensor", [spec.name for spec in task.inputs])
        values = tensor_values(tensor, spec, config.serving.max_batch_size > 0)
        if spec.use is Use.NEUTRAL_ONLY:
            check_neutral(spec.name, values, spec.neutral, spec.reason)
        else:
            given[spec.target] = values[0] if spec.dims == (1,) else values
    for spec in task.inputs:
        if not spec.is_optional and spec.target not in given:
            raise RequestError(spec.name, "missing")
    return given


def _int32s(values: Sequence[int]) -> Encoded:
    return (len(values),), struct.pack(f"<{len(values)}i", *values)


def _respond(raw: wire.Request, task: TaskContract, encoded: dict[str, Encoded], config: EngineConfig) -> bytes:
    """The one response, with the outputs that were asked for (all when none is named)."""
    wanted = frozenset(raw.requested_outputs)
    tensors = []
    for index, spec in enumerate(task.outputs):
        if wanted and spec.name not in wanted:
            continue
        shape, data = encoded[spec.name]
        tensors.append((index, (1, *shape) if config.serving.max_batch_size > 0 else shape, data))
    return wire.tensor_response(raw.handle, wire.ResponseFlag.FINAL, tensors)
