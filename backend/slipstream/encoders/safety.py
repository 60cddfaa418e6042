"""Classifies unsafe texts by category: by a policy and a head over a sentence encoder, or by a classifier's labels.

A text is judged as a whole (in overlapping pieces if long) and, unless `sentences` is off, sentence by sentence,
because one bad sentence disappears in the mean of a text. The score of a category is the maximum over these parts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream.core.errors import ConfigError
from slipstream.encoders.checkpoint import CLASSIFIER, SENTENCE
from slipstream.encoders.disguises import as_read, joined_letters
from slipstream.encoders.encoder import Encoder, open_encoder
from slipstream.encoders.parameters import Parameters
from slipstream.encoders.policy import Category, Head, HeadRow, read_head, read_policy


@dataclass(frozen=True)
class Verdict:
    """scores: of each of the model's categories, in its order; categories: those over their threshold, worst first."""

    scores: np.ndarray
    categories: tuple[str, ...]

    @property
    def is_flagged(self) -> bool:
        return bool(self.categories)


class PolicyScorer:
    """Vectors [n, width] -> scores [n, categories]."""

    def __init__(self, encoder: Encoder, policy: Sequence[Category], head: Head) -> None:
        self.names = tuple(category.name for category in policy)
        self._rows: list[HeadRow] = [head.rows.get(name, head.similarity) for name in self.names]
        own = [c.threshold for c in policy]
        self.thresholds = np.array([row.threshold if t is None else t for t, row in zip(own, self._rows)], np.float32)
        self._descriptions = [encoder.embed(category.descriptions)[0] for category in policy]

    def similarities(self, vectors: np.ndarray) -> np.ndarray:
        """[n, categories]: cosine with the nearest description of each category."""
        return np.stack([(vectors @ described.T).max(1) for described in self._descriptions], axis=1)

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        similarities = self.similarities(vectors)
        columns = []
        for index, row in enumerate(self._rows):
            logits = row.similarity_weight * similarities[:, index] + row.bias
            if row.weights.size:
                logits = logits + vectors @ row.weights
            columns.append(1 / (1 + np.exp(-logits)))
        return np.stack(columns, axis=1)


class LabelScorer:
    """Logits [n, labels] of a classifier -> probabilities of its unsafe labels."""

    def __init__(self, encoder: Encoder, unsafe_labels: str, threshold: float) -> None:
        checkpoint = encoder.checkpoint
        asked = [label.strip() for label in unsafe_labels.split(",") if label.strip()]
        unknown = [label for label in asked if label not in checkpoint.labels]
        if not asked or unknown:
            accepted = f"accepted: labels of the checkpoint, by commas: {', '.join(checkpoint.labels)}"
            raise ConfigError("unsafe_labels", unsafe_labels, accepted)
        self.names = tuple(asked)
        self.thresholds = np.full(len(asked), threshold, np.float32)
        self._columns = [checkpoint.labels.index(label) for label in asked]
        self._is_multi_label = checkpoint.is_multi_label

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        if self._is_multi_label:
            return (1 / (1 + np.exp(-logits)))[:, self._columns]
        powers = np.exp(logits - logits.max(1, keepdims=True))
        return (powers / powers.sum(1, keepdims=True))[:, self._columns]


def parts_of(text: str) -> list[str]:
    """The text, and its sentences if it has several; fragments shorter than a dozen characters are not judged alone."""
    sentences = [one.strip() for one in re.split(r"(?<=[.!?;:])\s+|\n+|[。！？]", text)]
    told = [sentence for sentence in sentences if len(sentence) >= 12]
    return [text, *dict.fromkeys(told)] if len(sentences) > 1 else [text]


def undisguised(parts: Sequence[str]) -> list[str]:
    """The parts as they are read, and those that have words letter by letter also with the words."""
    read = [as_read(part) for part in parts]
    return list(dict.fromkeys([*read, *map(joined_letters, read)]))


class SafetyJudge:
    def __init__(
        self,
        encoder: Encoder,
        scorer: PolicyScorer | LabelScorer,
        piece_tokens: int,
        piece_overlap: int,
        judges_sentences: bool = True,
    ) -> None:
        self.encoder = encoder
        self._scorer = scorer
        self._piece_tokens, self._piece_overlap = piece_tokens, piece_overlap
        self._judges_sentences = judges_sentences
        self.names = scorer.names

    def judge(self, texts: Sequence[str]) -> list[Verdict]:
        """One verdict per text, all texts in as few runs as possible; white space alone is never flagged."""
        verdicts = [Verdict(np.zeros(len(self.names), np.float32), ())] * len(texts)
        wanted = [number for number, text in enumerate(texts) if text.strip()]
        if not wanted:
            return verdicts
        parts, part_owners = [], []
        for number in wanted:
            own = undisguised(parts_of(texts[number]) if self._judges_sentences else [texts[number]])
            parts += own
            part_owners += [number] * len(own)
        outputs, piece_parts = self.encoder.embed_pieces(parts, self._piece_tokens, self._piece_overlap)
        scores, owners = self._scorer(outputs).astype(np.float32), np.array(part_owners)[piece_parts]
        for number in wanted:
            verdicts[number] = self._verdict(scores[owners == number].max(0))
        return verdicts

    def _verdict(self, scores: np.ndarray) -> Verdict:
        over = [index for index in np.argsort(-scores) if scores[index] >= self._scorer.thresholds[index]]
        return Verdict(scores, tuple(self.names[index] for index in over))


def open_safety(parameters: Parameters, model_folder: Path) -> SafetyJudge:
    """The judge that a model's parameters ask for.  Raises ConfigError."""
    policy_path = model_folder / parameters.text("policy", "policy.json")
    head_path = model_folder / parameters.text("head", "head.json")
    unsafe_labels = parameters.text("unsafe_labels", "")
    threshold = parameters.number("threshold", 0.5, 0.0, 1.0)
    piece_tokens = parameters.integer("piece_tokens", 64, 16, 512)
    piece_overlap = parameters.integer("piece_overlap", 16, 0, piece_tokens - 3)
    judges_sentences = parameters.choice("sentences", "on", ("on", "off")) == "on"
    encoder = open_encoder(parameters, model_folder, (SENTENCE, CLASSIFIER))
    scorer: PolicyScorer | LabelScorer
    if encoder.checkpoint.kind == CLASSIFIER:
        scorer = LabelScorer(encoder, unsafe_labels, threshold)
    else:
        policy = read_policy(policy_path)
        scorer = PolicyScorer(encoder, policy, read_head(head_path, encoder.checkpoint.width))
    return SafetyJudge(encoder, scorer, piece_tokens, piece_overlap, judges_sentences)
