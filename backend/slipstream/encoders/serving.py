"""The safety, quality and embedding models of Triton's Python backend: one encoder run per batch of requests.

Belongs to the one thread of a model instance. Imported by model.py files inside the backend's stub process only.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import triton_python_backend_utils as pb_utils

from slipstream.core.errors import RequestError, internal_error
from slipstream.encoders.check_calls import MAX_CHECK_CHARS
from slipstream.encoders.checkpoint import SENTENCE
from slipstream.encoders.encoder import Encoder, open_encoder
from slipstream.encoders.parameters import Parameters
from slipstream.encoders.quality import QualityJudge, open_quality
from slipstream.encoders.safety import SafetyJudge, Verdict, open_safety
from slipstream.encoders.text_tensors import strings

_log = logging.getLogger(__name__)
MAX_ENCODED_CHARS = 1_000_000  # the highest `max_chars`, and those that are judged at once: 0.4 GB of tokens
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


def answer(
    requests: Sequence[Any],
    read: Callable[[Any], list[Item]],
    compute: Callable[[list[Item]], Sequence[Result]],
    write: Callable[[list[Result]], Tensors],
) -> list[Any]:
    """One response per request: all good requests' rows in few compute calls, a bad request's error to it alone."""
    rows: list[Item] = []
    spans: list[tuple[int, int] | RequestError] = []
    for request in requests:
        try:
            own = read(request)
            spans.append((len(rows), len(rows) + len(own)))
            rows += own
        except RequestError as error:
            spans.append(error)
    try:
        results = [result for part in parts(rows) for result in compute(part)]
    except Exception as error:  # the top of the loop: every request gets an answer
        told = internal_error(_log, "an encoder run failed", error)
        failure = pb_utils.TritonError(str(told), pb_utils.TritonError.INTERNAL)
        return [pb_utils.InferenceResponse(error=failure) for _ in requests]
    responses = []
    for span in spans:
        if isinstance(span, RequestError):
            responses.append(refuse(span))
            continue
        tensors = write(list(results[span[0] : span[1]]))
        responses.append(pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in tensors.items()]))
    return responses


def parts(rows: Sequence[Item]) -> Iterator[list[Item]]:
    """The rows in order, of at most MAX_ENCODED_CHARS at once, as those of many requests may be together."""
    part: list[Item] = []
    num_chars = 0
    for row in rows:
        size = len(row) if isinstance(row, str) else sum(map(len, row))
        if part and num_chars + size > MAX_ENCODED_CHARS:
            yield part
            part, num_chars = [], 0
        part.append(row)
        num_chars += size
    if part:
        yield part


def opened(args: Mapping[str, str]) -> tuple[Parameters, Path]:
    return Parameters.of_model(json.loads(args["model_config"])), Path(args["model_repository"])


class SafetyModel:
    """text [n, 1] -> flagged, safe_text [n, 1], categories (padded with ""), scores, score_names [n, C]."""

    def initialize(self, args: Mapping[str, str]) -> None:
        parameters, folder = opened(args)
        self._withheld = parameters.text("withheld_text", "[withheld]")
        self._bound = CharBound.read(parameters, MAX_JUDGED_CHARS, lowest=MAX_CHECK_CHARS)  # `guarded` sends as many
        self._judge: SafetyJudge = open_safety(parameters, folder)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return answer(requests, lambda request: read_texts(request, "text", self._bound), self._judged, self._write)

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


class QualityModel:
    """prompt (optional), answer [n, 1] -> score [n, 1], checks [n, 1] (JSON)."""

    def initialize(self, args: Mapping[str, str]) -> None:
        parameters, folder = opened(args)
        self._bound = CharBound.read(parameters, MAX_ENCODED_CHARS)  # of which the encoder reads the beginnings
        self._judge: QualityJudge = open_quality(parameters, folder)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return answer(requests, self._read, self._judge.judge, self._write)

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


class EmbeddingModel:
    """text [n, 1] -> embedding [n, width], num_input_tokens [n, 1]."""

    def initialize(self, args: Mapping[str, str]) -> None:
        parameters, folder = opened(args)
        self._bound = CharBound.read(parameters, MAX_ENCODED_CHARS, is_of_each=True)  # their beginnings are read
        self._encoder: Encoder = open_encoder(parameters, folder, (SENTENCE,))

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return answer(requests, lambda request: read_texts(request, "text", self._bound), self._embed, self._write)

    def _embed(self, texts: list[str]) -> list[tuple[np.ndarray, int]]:
        vectors, counts = self._encoder.embed(texts)
        return list(zip(vectors, counts))

    @staticmethod
    def _write(results: list[tuple[np.ndarray, int]]) -> Tensors:
        return {
            "embedding": np.stack([vector for vector, _ in results]),
            "num_input_tokens": np.array([[count] for _, count in results], np.int32),
        }
