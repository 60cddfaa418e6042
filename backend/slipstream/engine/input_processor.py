"""Makes runnable requests of a client's: checks them against model and vocabulary, completes and expands them.

Called from submitting threads; holds no state. Whatever is wrong with a request
is said here, on its own thread, as a RequestError; the engine thread never sees it.
A grammar is compiled later, while its request waits; here its size is checked.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from slipstream.core.config import StructuredOutputConfig
from slipstream.core.errors import RequestError
from slipstream.core.finish import end_token_ids
from slipstream.core.grammar_limits import check_grammar
from slipstream.core.logits_processors import ProcessorCall
from slipstream.core.request import Request
from slipstream.core.request_memory import bytes_by_field
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.speculation import Speculation
from slipstream.engine.grammar_state import GrammarState
from slipstream.engine.prompt_tables import PromptTables
from slipstream.engine.token_rules import check_rules
from slipstream.nn.spec import DecoderSpec
from slipstream.tokenizer.tokenizer import TextTokenizer

_MASK64 = (1 << 64) - 1


class InputProcessor:
    """One per engine."""

    def __init__(
        self,
        spec: DecoderSpec,
        tokenizer: TextTokenizer,
        grammar_limits: StructuredOutputConfig,
        speculation_of: Callable[[SamplingParams], Speculation | None] = lambda params: None,
        check_processors: Callable[[Sequence[ProcessorCall]], None] = lambda calls: None,
        has_adapters: bool = False,
    ) -> None:
        self._tables = PromptTables(spec.vocab_size, spec.hidden_size, has_adapters)
        self._check_processors = check_processors
        self._speculation_of = speculation_of
        self._vocab_size = spec.vocab_size
        # as in vLLM the tokenizer's too: of fine-tuned models it may be the only one that names the end of a turn
        ends = {*spec.eos_token_ids, tokenizer.eos_token_id}
        # a generation_config.json may name tokens that the checkpoint does not have
        self._eos_token_ids = frozenset(end for end in ends if end is not None and 0 <= end < spec.vocab_size)
        self._tokenizer = tokenizer
        self._grammar_limits = grammar_limits

    @property
    def eos_token_ids(self) -> list[int]:
        """The checkpoint's own, by its configs and its tokenizer."""
        return sorted(self._eos_token_ids)

    def prepare(self, request: Request) -> list[Request]:
        """The request, completed (end tokens, seed, bad words as ids, guide), and its siblings when n > 1.

        Raises RequestError naming the field that the model cannot honour.
        """
        if not request.eos_token_ids:
            request.eos_token_ids = self._eos_token_ids
        request.params = self._resolve(request.params)
        self._tables.resolve(request)
        self._check_vocabulary(request)
        check_rules(request.params)
        self._check_processors(request.params.logits_processors)
        if request.params.seed is not None:
            request.seed = request.params.seed & _MASK64
        elif request.seed == 0:
            request.seed = random.getrandbits(64)
        request.params.build_automata()
        request.speculation = self._speculation_of(request.params) if request.prompt_rows is None else None
        if request.times.arrival_ns == 0:
            request.times.arrival_ns = time.time_ns()
        guide = request.params.guide
        if guide is not None:
            check_grammar(guide, self._grammar_limits)
        request.num_bytes = sum(bytes_by_field(request).values())
        sequences = expand(request)
        if guide is not None:
            ends = sorted(end_token_ids(request))
            for sequence in sequences:
                sequence.grammar_state, sequence.is_held = GrammarState(guide, ends, sequence), True
        return sequences

    def _resolve(self, params: SamplingParams) -> SamplingParams:
        """logprobs of -1, or of more tokens than there are, as the size of the vocabulary. bad_words as ids: a word is
        banned at the start of a line and after a space, however it tokenizes there."""
        params = _compact(params)
        logprobs, prompt_logprobs = self._up_to_all(params.logprobs), self._up_to_all(params.prompt_logprobs)
        if (logprobs, prompt_logprobs) != (params.logprobs, params.prompt_logprobs):
            params = replace(params, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        if not params.bad_words:
            return params
        texts = [text for word in params.bad_words for text in (word, " " + word.lstrip())]
        encoded = (tuple(token_ids) for token_ids in self._tokenizer.encode_all(texts) if token_ids)
        banned = dict.fromkeys((*params.bad_words_ids, *encoded))
        return replace(params, bad_words=(), bad_words_ids=tuple(banned))

    def _up_to_all(self, num_logprobs: int | None) -> int | None:
        if num_logprobs is None or 0 <= num_logprobs <= self._vocab_size:
            return num_logprobs
        return self._vocab_size

    def _check_vocabulary(self, request: Request) -> None:
        num_biases = len(request.params.embedding_bias)
        if num_biases > self._vocab_size and any(request.params.embedding_bias[self._vocab_size :]):
            accepted = f"accepted: at most {self._vocab_size}, the vocabulary, and zeros after them"
            raise RequestError("embedding_bias", f"got {num_biases} biases, {accepted}")
        for field, token_ids in _token_id_fields(request):
            for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
                if not 0 <= token_id < self._vocab_size:
                    accepted = f"accepted: 0 to {self._vocab_size - 1}"
                    raise RequestError(field, f"token id {token_id} is not in the vocabulary, {accepted}")


def _compact(params: SamplingParams) -> SamplingParams:
    """The lists that may be as long as a prompt or a vocabulary in 4 bytes an entry, while they wait and run. As tuples
    they took 40 and 32: 4 MB each for 128k entries."""
    if all(isinstance(values, array) or not values for values in (params.reference_ids, params.embedding_bias)):
        return params
    reference_ids, biases = array("i", params.reference_ids), array("f", params.embedding_bias)
    return replace(params, are_checked=True, reference_ids=reference_ids or (), embedding_bias=biases or ())


def expand(request: Request) -> list[Request]:
    """The n sequences of a client request, the given one first. Each has a seed of its own, derived from the first's;
    only the first reports prompt log-probabilities, which all share."""
    if request.params.n == 1 or request.params.beam_width > 1:
        return [request]
    siblings_params = request.params
    if siblings_params.prompt_logprobs is not None:
        siblings_params = replace(siblings_params, prompt_logprobs=None, return_context_logits=False)
        siblings_params.share_automata(request.params)
    siblings = [
        Request(
            prompt_token_ids=request.prompt_token_ids,
            params=siblings_params,
            seed=derive_seed(request.seed, index),
            priority=request.priority,
            deadline=request.deadline,
            handle=request.handle,
            request_id=request.request_id,
            sequence_index=index,
            eos_token_ids=request.eos_token_ids,
            prefix_key=request.prefix_key,
            adapter=request.adapter,
            prompt_rows=request.prompt_rows,
            speculation=request.speculation,
            times=replace(request.times),
        )
        for index in range(1, request.params.n)
    ]
    return [request, *siblings]


def derive_seed(seed: int, index: int) -> int:
    """The seed of sequence `index`: itself for 0, else mixed so that neighbouring seeds and indices share nothing.

    Source: splitmix64 (Steele et al. 2014).
    """
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    return mixed ^ (mixed >> 31)


def _token_id_fields(request: Request) -> Iterator[tuple[str, Collection[int]]]:
    params = request.params
    yield "prompt", request.prompt_token_ids
    yield from params.token_ids()
    yield "eos_token_ids", request.eos_token_ids
    if params.end_id is not None and params.end_id >= 0:  # TensorRT-LLM clients send -1 for "none"
        yield "end_id", [params.end_id]
