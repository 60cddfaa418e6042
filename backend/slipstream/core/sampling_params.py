"""Sampling parameters of one request. Frozen; shared by all threads.

Names are those of the vLLM and Hugging Face APIs. Bounds and defaults are those of the table of settings (settings.py),
which maps the TensorRT-LLM tensors on the same names.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, fields
from functools import cached_property

from slipstream.core.bad_words import BadWords, holds
from slipstream.core.errors import RequestError
from slipstream.core.logits_processors import ProcessorCall, read_calls
from slipstream.core.setting_kinds import Texts, TokenBiases, TokenIds, WordsIds
from slipstream.core.settings import BY_NAME, DEFAULTS, GUIDE_TYPES
from slipstream.core.word_automaton import WordAutomaton

LEAST_TEMPERATURE = 1e-5  # below it logits divided by it overflow fp32, and one token has all the probability anyway


@dataclass(frozen=True)
class Guide:
    """Guided decoding: the text of a JSON schema, regular expression or EBNF grammar. type "json" means any JSON."""

    type: str
    text: str = ""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request. `temperature=0` is greedy; `top_k=0` (or -1) and `top_p=1.0` are off.

    logprobs / prompt_logprobs: number of most likely alternatives to report (0 = the chosen token alone, None = off, -1
    = the vocabulary; requests are held to the model's max_logprobs). logprob_token_ids: further tokens to report.
    bad_words: texts; bad_words_ids / stop_token_ids / allowed_token_ids (None = all): token ids. logit_bias: (token id,
    bias) pairs; embedding_bias: a bias per token of the vocabulary, or nothing. Both are added.
    end_id replaces the checkpoint's end-of-sequence tokens when given.
    beam_width: above 1, the n best sequences of a beam search are returned, and nothing is drawn: temperature, top_k,
    top_p, min_p and seed have no effect (engine/beam_search.py). length_penalty and early_stopping are its.
    are_checked: the kinds have checked the values as they read them (client_settings.py).
    num_draft_tokens (0 = off), speculative_method, speculative_acceptance: None = the model's. reference_ids: tokens of
    a text that the output is expected to repeat in part, for n-gram drafts. Both long lists, these and embedding_bias,
    are arrays in a request that the engine has.
    """

    max_tokens: int = DEFAULTS["max_tokens"]
    min_tokens: int = DEFAULTS["min_tokens"]
    temperature: float = DEFAULTS["temperature"]
    top_k: int = DEFAULTS["top_k"]
    top_p: float = DEFAULTS["top_p"]
    min_p: float = DEFAULTS["min_p"]
    repetition_penalty: float = DEFAULTS["repetition_penalty"]
    presence_penalty: float = DEFAULTS["presence_penalty"]
    frequency_penalty: float = DEFAULTS["frequency_penalty"]
    logit_bias: tuple[tuple[int, float], ...] = DEFAULTS["logit_bias"]
    embedding_bias: Sequence[float] = DEFAULTS["embedding_bias"]
    seed: int | None = DEFAULTS["seed"]
    n: int = DEFAULTS["n"]
    beam_width: int = DEFAULTS["beam_width"]
    length_penalty: float = DEFAULTS["length_penalty"]
    early_stopping: bool = DEFAULTS["early_stopping"]
    stop: tuple[str, ...] = DEFAULTS["stop"]
    stop_token_ids: tuple[int, ...] = DEFAULTS["stop_token_ids"]
    stop_words_ids: tuple[tuple[int, ...], ...] = DEFAULTS["stop_words_ids"]
    bad_words: tuple[str, ...] = DEFAULTS["bad_words"]
    bad_words_ids: tuple[tuple[int, ...], ...] = DEFAULTS["bad_words_ids"]
    allowed_token_ids: tuple[int, ...] | None = DEFAULTS["allowed_token_ids"]
    ignore_eos: bool = DEFAULTS["ignore_eos"]
    end_id: int | None = DEFAULTS["end_id"]
    logprobs: int | None = DEFAULTS["logprobs"]
    prompt_logprobs: int | None = DEFAULTS["prompt_logprobs"]
    logprob_token_ids: tuple[int, ...] = DEFAULTS["logprob_token_ids"]
    return_context_logits: bool = DEFAULTS["return_context_logits"]
    return_generation_logits: bool = DEFAULTS["return_generation_logits"]
    include_stop_str_in_output: bool = DEFAULTS["include_stop_str_in_output"]
    skip_special_tokens: bool = DEFAULTS["skip_special_tokens"]
    detokenize: bool = DEFAULTS["detokenize"]
    logits_processors: tuple[ProcessorCall, ...] = DEFAULTS["logits_processors"]
    guide: Guide | None = None
    num_draft_tokens: int | None = DEFAULTS["num_draft_tokens"]
    speculative_method: str | None = DEFAULTS["speculative_method"]
    speculative_acceptance: str | None = DEFAULTS["speculative_acceptance"]
    reference_ids: Sequence[int] = DEFAULTS["reference_ids"]

    are_checked: InitVar[bool] = False

    def __post_init__(self, are_checked: bool) -> None:
        if not are_checked:
            for name in _LISTS:
                if getattr(self, name) is None:  # vLLM's default of its lists
                    object.__setattr__(self, name, ())
            for name in _TEXTS:
                if isinstance(text := getattr(self, name), str):  # one string, as requests may have it
                    object.__setattr__(self, name, (text,))
            if isinstance(biases := self.logit_bias, Mapping):  # an object, as requests have it
                object.__setattr__(self, "logit_bias", tuple(biases.items()))
            if self.logits_processors:  # names, or objects, as requests have them
                calls = read_calls("logits_processors", self.logits_processors)
                object.__setattr__(self, "logits_processors", calls)
            self._check_values()
        if self.temperature < LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if self.top_p == 0.0:  # TensorRT-LLM: off; with no top_k either, greedy
            object.__setattr__(self, "top_p", 1.0)
            if self.top_k == 0:
                object.__setattr__(self, "temperature", 0.0)
        if (self.logprob_token_ids or self.return_generation_logits) and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)
        if self.return_context_logits and self.prompt_logprobs is None:
            object.__setattr__(self, "prompt_logprobs", 0)
        if self.stop and not self.detokenize:
            raise RequestError("stop", "stop strings are found in text, accepted: none with detokenize=false")
        if self.beam_width > 1:
            self._check_beams()
        if self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"got {self.min_tokens}, accepted: at most max_tokens={self.max_tokens}")

    def _check_values(self) -> None:
        for name, kind, default in _KINDS:
            value = getattr(self, name)
            if value is not default:
                kind.check(name, value)
        if self.guide is not None and self.guide.type not in GUIDE_TYPES:
            accepted = ", ".join(GUIDE_TYPES)
            raise RequestError("guided_decoding_guide_type", f"got {self.guide.type!r}, accepted: {accepted}")

    def _check_beams(self) -> None:
        if self.n > self.beam_width:
            raise RequestError("n", f"got {self.n}, accepted: at most beam_width={self.beam_width}")
        for name in _NOT_WITH_BEAMS:
            if (value := getattr(self, name)) != (default := DEFAULTS.get(name)):
                raise RequestError(name, f"got {value!r:.80}, accepted with beam search: {default!r}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_last_token(self) -> bool:
        """Whether the next token cannot be drawn before the host knows the last one. Call it once bad_words are ids."""
        reads_text = self.guide is not None or bool(self.logits_processors)
        return reads_text or any(len(word) > 1 for word in self.bad_words_ids)

    @cached_property
    def stop_automaton(self) -> WordAutomaton:
        return WordAutomaton.of_texts(self.stop)

    @cached_property
    def stop_words_automaton(self) -> WordAutomaton:
        return WordAutomaton(self.stop_words_ids)

    @cached_property
    def bad_words_automaton(self) -> BadWords:
        return BadWords(self.bad_words_ids)

    @cached_property
    def sorted_allowed_ids(self) -> array[int]:
        return array("i", sorted(set(self.allowed_token_ids or ())))

    def allows(self, token_id: int) -> bool:
        """Whether the token is one of allowed_token_ids, or all are."""
        return not self.allowed_token_ids or holds(self.sorted_allowed_ids, token_id)

    def check_max_logprobs(self, limit: int, spelled: Callable[[str], str] = str) -> None:
        """Raises RequestError for more alternatives than the model's max_logprobs. spelled: the client's own names."""
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(self, name)
            if limit != -1 and asked is not None and not 0 <= asked <= limit:
                accepted = f"0 to max_logprobs={limit}, a parameter of the model"
                raise RequestError(spelled(name), f"got {asked}, accepted: {accepted}")

    def token_ids(self) -> Iterator[tuple[str, Collection[int]]]:
        """Token ids by setting, for the check against the vocabulary."""
        for name, kind in _WITH_TOKEN_IDS:
            if value := getattr(self, name):
                yield name, kind.token_ids(value)

    def build_automata(self) -> None:
        """Build them on the submitting thread, so that the engine's and the output thread need not."""
        if self.stop:
            _ = self.stop_automaton
        if self.stop_words_ids:
            _ = self.stop_words_automaton
        if self.bad_words_ids:
            _ = self.bad_words_automaton
        if self.allowed_token_ids:
            _ = self.sorted_allowed_ids

    def share_automata(self, other: SamplingParams) -> None:
        """Take those that other has built. Its words are equal."""
        for name in ("stop_automaton", "stop_words_automaton", "bad_words_automaton", "sorted_allowed_ids"):
            if name in other.__dict__:
                self.__dict__[name] = other.__dict__[name]


# beams are chosen by the model's own probabilities, and a text is known only when it is chosen
_NOT_WITH_BEAMS = (
    *("min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "embedding_bias"),
    *("stop", "stop_words_ids", "bad_words", "bad_words_ids", "allowed_token_ids", "logprob_token_ids"),
    *("return_context_logits", "return_generation_logits", "prompt_logprobs", "guide", "logits_processors"),
)
_KINDS = tuple((f.name, BY_NAME[f.name].kind, f.default) for f in fields(SamplingParams) if f.name in BY_NAME)
FIELD_NAMES = tuple(name for name, _, _ in _KINDS)
_LISTS = tuple(name for name, _, default in _KINDS if default == ())
_TEXTS = tuple(name for name, kind, _ in _KINDS if isinstance(kind, Texts))
_WITH_TOKEN_IDS = tuple((name, kind) for name, kind, _ in _KINDS if isinstance(kind, TokenIds | WordsIds | TokenBiases))
