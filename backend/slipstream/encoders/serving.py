"""The safety, quality and embedding models of Triton's Python backend: short requests go through the encoder together.

Two threads: Triton's, which reads requests and returns at once, and the encoder's, which answers short ones first.
Imported by model.py files inside the backend's stub process only.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import triton_python_backend_utils as pb_utils

from slipstream.core.errors import RequestError, internal_error
from slipstream.encoders.check_calls import MAX_CHECK_CHARS
from slipstream.encoders.checkpoint import SENTENCE
from slipstream.encoders.encoder import Encoder, open_encoder
from slipstream.encoders.parameters import Parameters
from slipstream.encoders.quality import QualityJudge, open_quality
from slipstream.encoders.safety import SafetyJudge, Verdict, open_safety
from slipstream.encoders.short_first import ShortFirst
from slipstream.encoders.text_tensors import strings

_log = logging.getLogger(__name__)
MAX_ENCODED_CHARS = 1_000_000  # the highest `max_chars`, and those that are judged at once: 0.4 GB of tokens
_ROW_CHARS = 256  # a piece of a text: as many texts go together as fill a run
MAX_JUDGED_CHARS = 32_000  # the default of `safety`: 2.4 s of two cores for English, 8.6 s for Chinese

Item = TypeVar("Item", str, tuple[str, str])
Result = TypeVar("Result")
Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class CharBound:
    """How long the texts of an input may be, in all or each.  parameter: of config.pbtxt, which says so."""

    max_chars: int
    parameter: str = "max_chars"
    is_of_each: bool = False

    @classmethod
    def read(cls, parameters: Parameters, default: int, lowest: int = 1, is_of_each: bool = False) -> CharBound:
        """Raises ConfigError."""
        max_chars = parameters.integer(cls.parameter, default, lowest, MAX_ENCODED_CHARS)
        return cls(max_chars, is_of_each=is_of_each)

    def check(self, name: str, texts: Sequence[str]) -> None:
        """Raises RequestError for the input of this name."""
        num_chars = max(map(len, texts), default=0) if self.is_of_each else sum(map(len, texts))
        if num_chars > self.max_chars:
            told = f"has {num_chars} characters; accepted: at most {self.max_chars} ({self.parameter})"
            raise RequestError(name, told)


def read_texts(request: Any, name: str, bound: CharBound) -> list[str]:
    """The texts of a BYTES input, one per row.  Raises RequestError."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        raise RequestError(name, "is missing")
    texts = [decode(name, value) for value in tensor.as_numpy().reshape(-1)]
    bound.check(name, texts)
    return texts


def decode(name: str, value: Any) -> str:
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise RequestError(name, f"is not UTF-8: {error.reason} at byte {error.start}") from None


def refuse(error: RequestError) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))


class Served(Generic[Item, Result]):
    """The requests of a model. read: the rows of a request, or RequestError. read_chars: of a row that are encoded."""

    def __init__(
        self,
        encoder: Encoder,
        read: Callable[[Any], list[Item]],
        compute: Callable[[list[Item]], Sequence[Result]],
        write: Callable[[list[Result]], Tensors],
        read_chars: int = MAX_ENCODED_CHARS,
    ) -> None:
        self._read: Callable[[Any], list[Item]] = read
        self._compute: Callable[[list[Item]], Sequence[Result]] = compute
        self._write, self._read_chars = write, read_chars
        self._turns: ShortFirst[Item, Result] = ShortFirst(self._compute_in_parts, encoder.max_rows * _ROW_CHARS)
        encoder.between_runs = self._turns.give_way

    def take(self, requests: Sequence[Any]) -> None:
        """Answers those that are bad; the others are answered later, each by itself."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                rows = self._read(request)
            except RequestError as error:
                _send(sender, refuse(error))
                continue
            except Exception as error:  # if it went on, the server would refuse those that are answered later, too
                self._answer(sender, error)
                continue
            size = sum(min(num_chars(row), self._read_chars) for row in rows)
            self._turns.submit(rows, size, functools.partial(self._answer, sender))

    def close(self) -> None:
        self._turns.close()

    def _compute_in_parts(self, rows: list[Item]) -> Sequence[Result]:
        return [result for part in parts(rows) for result in self._compute(part)]

    def _answer(self, sender: Any, results: Sequence[Result] | Exception) -> None:
        try:
            if isinstance(results, Exception):
                raise results
            tensors = [pb_utils.Tensor(name, value) for name, value in self._write(list(results)).items()]
        except Exception as error:  # the top of the request
            told = str(internal_error(_log, "a request of an encoder failed", error))
            response = pb_utils.InferenceResponse(error=pb_utils.TritonError(told, pb_utils.TritonError.INTERNAL))
            _send(sender, response)
        else:
            _send(sender, pb_utils.InferenceResponse(tensors))


def _send(sender: Any, response: Any) -> None:
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def num_chars(row: str | tuple[str, str]) -> int:
    return len(row) if isinstance(row, str) else sum(map(len, row))


def parts(rows: Sequence[Item]) -> Iterator[list[Item]]:
    """The rows in order, of at most MAX_ENCODED_CHARS at once, as those of a request may be together."""
    part: list[Item] = []
    num_held = 0
    for row in rows:
        size = num_chars(row)
        if part and num_held + size > MAX_ENCODED_CHARS:
            yield part
            part, num_held = [], 0
        part.append(row)
        num_held += size
    if part:
        yield part


def opened(args: Mapping[str, str]) -> tuple[Parameters, Path]:
    return Parameters.of_model(json.loads(args["model_config"])), Path(args["model_repository"])


class EncoderModel:
    """What Triton calls on a model once it is initialized, which sets _served."""

    _served: Served[Any, Any]

    def execute(self, requests: Sequence[Any]) -> None:
        self._served.take(requests)

    def finalize(self) -> None:
        self._served.close()


class SafetyModel(EncoderModel):
    """text [n, 1] -> flagged, safe_text [n, 1], categories (padded with ""), scores, score_names [n, C]."""

    def initialize(self, args: Mapping[str, str]) -> None:
        parameters, folder = opened(args)
        self._withheld = parameters.text("withheld_text", "[withheld]")
        self._bound = CharBound.read(parameters, MAX_JUDGED_CHARS, lowest=MAX_CHECK_CHARS)  # `guarded` sends as many
        self._judge: SafetyJudge = open_safety(parameters, folder)
        self._served = Served(self._judge.encoder, self._read, self._judged, self._write)

    def _read(self, request: Any) -> list[str]:
        return read_texts(request, "text", self._bound)

    def _judged(self, texts: list[str]) -> list[tuple[str, Verdict]]:
        return list(zip(texts, self._judge.judge(texts)))

    def _write(self, results: list[tuple[str, Verdict]]) -> Tensors:
        names = self._judge.names
        verdicts = [verdict for _, verdict in results]
        safe = [[self._withheld if verdict.is_flagged else text] for text, verdict in results]
        return {
            "flagged": np.array([[verdict.is_flagged] for verdict in verdicts]),
            "categories": strings([[*v.categories, *[""] * (len(names) - len(v.categories))] for v in verdicts]),
            "scores": np.stack([verdict.scores for verdict in verdicts]),
            "score_names": strings([names] * len(verdicts)),
            "safe_text": strings(safe),
        }


class QualityModel(EncoderModel):
    """prompt (optional), answer [n, 1] -> score [n, 1], checks [n, 1] (JSON)."""

    def initialize(self, args: Mapping[str, str]) -> None:
        parameters, folder = opened(args)
        self._bound = CharBound.read(parameters, MAX_ENCODED_CHARS)  # of which the encoder reads the beginnings
        self._judge: QualityJudge = open_quality(parameters, folder)
        encoder = self._judge.encoder
        self._served = Served(encoder, self._read, self._judge.judge, self._write, 2 * encoder.max_read_chars)

    def _read(self, request: Any) -> list[tuple[str, str]]:
        answers = read_texts(request, "answer", self._bound)
        if pb_utils.get_input_tensor_by_name(request, "prompt") is None:
            return [("", answer) for answer in answers]
        prompts = read_texts(request, "prompt", self._bound)
        if len(prompts) != len(answers):
            raise RequestError("answer", f"has {len(answers)} rows, prompt has {len(prompts)}; accepted: as many")
        return list(zip(prompts, answers))

    @staticmethod
    def _write(results: list[tuple[float, dict[str, float]]]) -> Tensors:
        return {
            "score": np.array([[score] for score, _ in results], np.float32),
            "checks": strings([[json.dumps(checks)] for _, checks in results]),
        }


class EmbeddingModel(EncoderModel):
    """text [n, 1] -> embedding [n, width], num_input_tokens [n, 1]."""

    def initialize(self, args: Mapping[str, str]) -> None:
        parameters, folder = opened(args)
        self._bound = CharBound.read(parameters, MAX_ENCODED_CHARS, is_of_each=True)  # their beginnings are read
        self._encoder: Encoder = open_encoder(parameters, folder, (SENTENCE,))
        self._served = Served(self._encoder, self._read, self._embed, self._write, self._encoder.max_read_chars)

    def _read(self, request: Any) -> list[str]:
        return read_texts(request, "text", self._bound)

    def _embed(self, texts: list[str]) -> list[tuple[np.ndarray, int]]:
        vectors, counts = self._encoder.embed(texts)
        return list(zip(vectors, counts))

    @staticmethod
    def _write(results: list[tuple[np.ndarray, int]]) -> Tensors:
        return {
            "embedding": np.stack([vector for vector, _ in results]),
            "num_input_tokens": np.array([[count] for _, count in results], np.int32),
        }
