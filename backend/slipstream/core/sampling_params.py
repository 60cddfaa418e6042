"""What a client may ask of sampling, validated once at the border. Frozen; shared by all threads.

Names and defaults are those of the vLLM and Hugging Face APIs; core/contract.py maps the TensorRT-LLM tensors on them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from slipstream.core.errors import RequestError

GUIDE_TYPES = ("json", "json_schema", "regex", "ebnf_grammar")


@dataclass(frozen=True)
class Guide:
    """Guided decoding: the text of a JSON schema, regular expression or EBNF grammar. type "json" means any JSON."""

    type: str
    text: str = ""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request. `temperature=0` is greedy; `top_k=0` (or -1) and `top_p=1.0` are off.

    logprobs / prompt_logprobs: number of most likely alternatives to report (0 = the chosen token alone, None = off).
    bad_words: texts; bad_words_ids / stop_token_ids: token ids. logit_bias: (token id, bias) pairs.
    end_id replaces the checkpoint's end-of-sequence tokens when given.
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

    def __post_init__(self) -> None:
        for check in _CHECKS:
            name, is_good, accepted = check
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise RequestError(name, f"got {value!r}, accepted: a finite number")
            if value is not None and not is_good(value):
                raise RequestError(name, f"got {value!r}, accepted: {accepted}")
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
        return self.guide is not None or self.has_penalties or any(len(word) > 1 for word in self.bad_words_ids)


# (field, predicate, what is accepted): one row per bounded field
_CHECKS = (
    ("max_tokens", lambda v: v >= 1, "an integer >= 1"),
    ("min_tokens", lambda v: v >= 0, "an integer >= 0"),
    ("temperature", lambda v: 0.0 <= v <= 100.0, "a number from 0 (greedy) to 100"),
    ("top_k", lambda v: v >= -1, "an integer >= 1, or 0 or -1 for all tokens"),
    ("top_p", lambda v: 0.0 < v <= 1.0, "a number in (0, 1]"),
    ("min_p", lambda v: 0.0 <= v <= 1.0, "a number in [0, 1]"),
    ("repetition_penalty", lambda v: 0.0 < v <= 10.0, "a number in (0, 10]"),
    ("presence_penalty", lambda v: -2.0 <= v <= 2.0, "a number in [-2, 2]"),
    ("frequency_penalty", lambda v: -2.0 <= v <= 2.0, "a number in [-2, 2]"),
    ("seed", lambda v: -(2**63) <= v < 2**64, "a 64-bit integer"),
    ("n", lambda v: 1 <= v <= 128, "an integer from 1 to 128"),
    ("logprobs", lambda v: 0 <= v <= 20, "an integer from 0 to 20"),
    ("prompt_logprobs", lambda v: 0 <= v <= 20, "an integer from 0 to 20"),
    ("logit_bias", lambda v: all(abs(bias) <= 100.0 for _, bias in v), "biases from -100 to 100"),
    ("stop", lambda v: all(v), "non-empty strings"),
    ("bad_words", lambda v: all(v), "non-empty strings"),
    ("bad_words_ids", lambda v: all(v), "non-empty lists of token ids"),
    ("stop_words_ids", lambda v: all(v), "non-empty lists of token ids"),
)

FIELD_NAMES = tuple(f.name for f in fields(SamplingParams))
