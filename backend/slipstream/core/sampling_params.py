"""What a client may ask of sampling, validated once at the border. Frozen; shared by all threads.

Names and defaults are those of the vLLM and Hugging Face APIs; core/contract.py maps the TensorRT-LLM tensors on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Integral, Real
from typing import Any

from slipstream.core.bad_words import BadWords
from slipstream.core.config import ACCEPTANCES, NO_SPECULATION
from slipstream.core.draft_methods import SPECULATIVE_METHODS
from slipstream.core.errors import RequestError
from slipstream.core.setting_values import MAX_INT32, refuse
from slipstream.core.word_automaton import WordAutomaton

GUIDE_TYPES = ("json", "json_schema", "regex", "ebnf_grammar")
MAX_BIAS = 100.0  # of one token's logit, either way
LEAST_TEMPERATURE = 1e-5  # below it logits divided by it overflow fp32, and one token has all the probability anyway


@dataclass(frozen=True)
class Guide:
    """Guided decoding: the text of a JSON schema, regular expression or EBNF grammar. type "json" means any JSON."""

    type: str
    text: str = ""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request. `temperature=0` is greedy; `top_k=0` (or -1) and `top_p=1.0` are off.

    logprobs / prompt_logprobs: number of most likely alternatives to report (0 = the chosen token alone, None = off).
    bad_words: texts; bad_words_ids / stop_token_ids: token ids. logit_bias: (token id, bias) pairs; embedding_bias: a
    bias per token of the vocabulary, or nothing. Both are added.
    end_id replaces the checkpoint's end-of-sequence tokens when given.
    num_draft_tokens (0 = off), speculative_method, speculative_acceptance: None = the server's; reference_ids: a text
    that the output is expected to repeat parts of, for drafts.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    embedding_bias: tuple[float, ...] = ()
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_words_ids: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    end_id: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    guide: Guide | None = field(default=None)
    num_draft_tokens: int | None = None
    speculative_method: str | None = None
    speculative_acceptance: str | None = None
    reference_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, is_good, accepted in _CHECKS:
            value = getattr(self, name)
            if value is not None and not is_good(value):
                raise refuse(name, value, accepted)
        if self.temperature < LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"got {self.min_tokens}, accepted: at most max_tokens={self.max_tokens}")
        if self.guide is not None and self.guide.type not in GUIDE_TYPES:
            accepted = ", ".join(GUIDE_TYPES)
            raise RequestError("guided_decoding_guide_type", f"got {self.guide.type!r}, accepted: {accepted}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_last_token(self) -> bool:
        """Whether the host must know the last token before the next can be drawn. bad_words must be ids by then."""
        return self.guide is not None or any(len(word) > 1 for word in self.bad_words_ids)

    @cached_property
    def stop_automaton(self) -> WordAutomaton[str]:
        return WordAutomaton(self.stop)

    @cached_property
    def stop_words_automaton(self) -> WordAutomaton[int]:
        return WordAutomaton(self.stop_words_ids)

    @cached_property
    def bad_words_automaton(self) -> BadWords:
        return BadWords(self.bad_words_ids)

    def build_automata(self) -> None:
        """On the submitting thread, so that neither the engine's nor the output's has to."""
        _ = self.stop_automaton, self.stop_words_automaton, self.bad_words_automaton


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _integer(low: int, high: int = MAX_INT32) -> Callable[[Any], bool]:
    return lambda value: _is(value, Integral) and low <= value <= high


def _number(low: float, high: float) -> Callable[[Any], bool]:
    """Neither NaN nor an infinity passes."""
    return lambda value: _is(value, Real) and low <= value <= high


_is_share = _number(0.0, 1.0)


def _are_kind(values: Any, kind: type) -> bool:
    """There may be hundreds of thousands: types are looked at once per type."""
    return all(issubclass(found, kind) and found is not bool for found in set(map(type, values)))


def _are_token_ids(token_ids: Any) -> bool:
    return not token_ids or (_are_kind(token_ids, Integral) and min(token_ids) >= 0 and max(token_ids) <= MAX_INT32)


def _are_biases(pairs: Any) -> bool:
    return _are_token_ids([token_id for token_id, _ in pairs]) and _is_bias_vector([bias for _, bias in pairs])


def _is_bias_vector(biases: Any) -> bool:
    if not biases:
        return True
    is_number = _are_kind(biases, Real) and not math.isnan(sum(biases))
    return is_number and min(biases) >= -MAX_BIAS and max(biases) <= MAX_BIAS


def _are_words(words: Any) -> bool:
    return all(word and _are_token_ids(word) for word in words)


_WORDS_IDS = f"non-empty lists of token ids from 0 to {MAX_INT32}"

# (field, predicate, what is accepted): one row per bounded field. What passes fits the type that the engine holds it
# in: int32 and fp32, seeds 64 bits.
_CHECKS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("max_tokens", _integer(1), f"an integer from 1 to {MAX_INT32}"),
    ("min_tokens", _integer(0), f"an integer from 0 to {MAX_INT32}"),
    ("temperature", _number(0.0, 100.0), "a number from 0 (greedy) to 100"),
    ("top_k", _integer(-1), f"an integer from 1 to {MAX_INT32}, or 0 or -1 for all tokens"),
    ("top_p", lambda v: _is_share(v) and v > 0.0, "a number in (0, 1]"),
    ("min_p", _is_share, "a number in [0, 1]"),
    ("repetition_penalty", _number(0.01, 10.0), "a number from 0.01 to 10"),
    ("presence_penalty", _number(-2.0, 2.0), "a number in [-2, 2]"),
    ("frequency_penalty", _number(-2.0, 2.0), "a number in [-2, 2]"),
    ("seed", _integer(-(2**63), 2**64 - 1), "a 64-bit integer"),
    ("n", _integer(1, 128), "an integer from 1 to 128"),
    ("end_id", _integer(-1), f"a token id from 0 to {MAX_INT32}, or -1 for none"),
    ("logprobs", _integer(0, 20), "an integer from 0 to 20"),
    ("prompt_logprobs", _integer(0, 20), "an integer from 0 to 20"),
    ("num_draft_tokens", _integer(0), f"an integer from 0 (no drafts) to {MAX_INT32}"),
    (
        "speculative_method",
        lambda v: v in (*SPECULATIVE_METHODS, NO_SPECULATION),
        f"{', '.join(SPECULATIVE_METHODS)} or none",
    ),
    ("speculative_acceptance", lambda v: v in ACCEPTANCES, ", ".join(ACCEPTANCES)),
    ("reference_ids", _are_token_ids, f"token ids from 0 to {MAX_INT32}"),
    ("logit_bias", _are_biases, f"biases from -100 to 100 of token ids from 0 to {MAX_INT32}"),
    ("embedding_bias", _is_bias_vector, "biases from -100 to 100"),
    ("stop", lambda v: all(v), "non-empty strings"),
    ("bad_words", lambda v: all(v), "non-empty strings"),
    ("stop_token_ids", _are_token_ids, f"token ids from 0 to {MAX_INT32}"),
    ("bad_words_ids", _are_words, _WORDS_IDS),
    ("stop_words_ids", _are_words, _WORDS_IDS),
)

FIELD_NAMES = tuple(f.name for f in fields(SamplingParams))
