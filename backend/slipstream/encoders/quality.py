"""Scores the quality of an answer: the product of four checks between 0 and 1.

Relevance is the cosine of the two texts by a sentence encoder; the others are plain code.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slipstream.encoders.checkpoint import SENTENCE
from slipstream.encoders.encoder import Encoder, open_encoder
from slipstream.encoders.parameters import Parameters

_NGRAM = 4
_LANGUAGES = {  # frequent words that the others lack
    "en": {"the", "and", "of", "to", "is", "that", "with", "for", "you", "this"},
    "de": {"der", "und", "das", "ist", "nicht", "ein", "mit", "zu", "ich", "sie"},
    "fr": {"le", "et", "les", "des", "est", "une", "pour", "dans", "que", "vous"},
    "es": {"el", "los", "y", "las", "es", "por", "una", "con", "como", "del"},
}


def repetition(answer: str) -> float:
    """Share of the answer's word 4-grams that are not repeats; 1 for short answers."""
    words = answer.split()
    grams = Counter(tuple(words[i : i + _NGRAM]) for i in range(len(words) - _NGRAM + 1))
    total = sum(grams.values())
    return len(grams) / total if total else 1.0


def language(prompt: str, answer: str) -> float:
    """0 when prompt and answer are in different scripts or in different ones of four languages, 1 otherwise.

    Words decide only between English, German, French and Spanish, and only when both texts have two of them.
    """
    scripts = _script(prompt), _script(answer)
    if all(scripts) and scripts[0] != scripts[1]:
        return 0.0
    spoken = _language(prompt), _language(answer)
    return 0.0 if all(spoken) and spoken[0] != spoken[1] else 1.0


def _script(text: str) -> str:
    """The first word of most letters' Unicode names: LATIN, CYRILLIC, CJK, ...; "" without letters."""
    counts = Counter(unicodedata.name(letter, "?").split()[0] for letter in text[:2000] if letter.isalpha())
    return counts.most_common(1)[0][0] if counts else ""


def _language(text: str) -> str:
    words = Counter(re.findall(r"[^\W\d_]+", text[:4000].lower()))
    hits = {name: sum(words[word] for word in frequent) for name, frequent in _LANGUAGES.items()}
    best = max(hits, key=lambda name: hits[name])
    return best if hits[best] >= 2 else ""


def form(prompt: str, answer: str) -> float:
    """Fraction of passed checks: no broken characters, closed code fences, JSON if requested; 0 if empty."""
    if not answer.strip():
        return 0.0
    checks = ["\ufffd" not in answer, answer.count("```") % 2 == 0]
    if re.search(r"\b(in|as|valid|only|return|respond with)\b[^.]{0,20}\bjson\b", prompt, re.I):
        checks.append(_is_json(answer))
    return sum(checks) / len(checks)


def _is_json(answer: str) -> bool:
    fenced = re.search(r"```(?:json)?(.*?)```", answer, re.S)
    try:
        json.loads(fenced.group(1).strip() if fenced else answer)
    except (ValueError, RecursionError):
        return False
    return True


class QualityJudge:
    def __init__(self, encoder: Encoder, low: float, high: float) -> None:
        self.encoder = encoder
        self._low, self._high = low, high

    def judge(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, dict[str, float]]]:
        """(score, checks) of each (prompt, answer), all texts in as few runs as possible.

        Without a prompt ("") relevance and language are not among the checks.
        """
        vectors, _ = self.encoder.embed([text for pair in pairs for text in pair])
        cosines = (vectors[0::2] * vectors[1::2]).sum(1)
        results = []
        for (prompt, answer), cosine in zip(pairs, cosines):
            checks = {"repetition": repetition(answer), "format": form(prompt, answer)}
            if prompt:
                relevance = float(np.clip((cosine - self._low) / (self._high - self._low), 0.0, 1.0))
                checks["relevance"] = relevance if answer.strip() else 0.0
                checks["language"] = language(prompt, answer)
            results.append((float(np.prod(list(checks.values()))), {k: round(v, 4) for k, v in checks.items()}))
        return results


def open_quality(parameters: Parameters, model_folder: Path) -> QualityJudge:
    """relevance is 0 at a cosine of `relevance_low` and 1 at `relevance_high`.  Raises ConfigError."""
    low = parameters.number("relevance_low", 0.0, -1.0, 0.99)
    high = parameters.number("relevance_high", 0.6, low + 0.01, 1.0)
    return QualityJudge(open_encoder(parameters, model_folder, (SENTENCE,)), low, high)
