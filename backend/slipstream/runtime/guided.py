"""Guided decoding through xgrammar: grammars compiled once per text, one matcher per request, one bitmask per step.

`GuideCompiler` is called from submitting threads (it locks); a `GuideState` belongs to the engine thread once its
request is submitted. Knows tokens and masks only: nothing of models, batches or the scheduler.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from slipstream.core.errors import EngineError, RequestError, SlipstreamError
from slipstream.core.request import Request
from slipstream.core.sampling_params import Guide
from slipstream.runtime.penalties import Paths
from slipstream.runtime.tokenizer import TextTokenizer

if TYPE_CHECKING:
    import xgrammar  # pulls in transformers, 0.7 s of every start: imported where the first guide needs it

FIELD = "guided_decoding_guide"
DEAD_END = "the grammar admits neither another token nor the end after the text so far"
MAX_CACHED_GRAMMARS = 256
# xgrammar 0.2 lets control characters (a tab) into strings with minLength or maxLength; no JSON parser takes them
_LAX_CHARACTER = r"[^\"\\\r\n]"
_STRICT_CHARACTER = r"[^\0-\x1f\"\\]"
MAX_WHITESPACE = 32  # characters in a row between JSON tokens: enough to indent, no endless blank page


class GuideState:
    """Where one sequence stands in its grammar. The end tokens are allowed exactly when the grammar may end there."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, end_token_ids: Iterable[int]) -> None:
        import xgrammar

        ends = sorted(end_token_ids)
        self._matcher = xgrammar.GrammarMatcher(
            grammar, override_stop_tokens=ends or None, terminate_without_stop_token=not ends
        )

    @property
    def is_terminated(self) -> bool:
        """The text is complete and its end token was taken (or there is none to take): nothing may follow."""
        return bool(self._matcher.is_terminated())

    def fill_mask(self, bitmask: torch.Tensor, row: int) -> None:
        """Write the allowed next tokens as bits into bitmask[row] (int32, CPU)."""
        self._matcher.fill_next_token_bitmask(bitmask, row)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Move on by sampled tokens. Raises EngineError on a token that the mask forbade (a bug of ours)."""
        for token_id in token_ids:
            if not self._matcher.accept_token(token_id):
                raise EngineError(f"guided decoding: sampled token {token_id} is not allowed by the grammar")

    def may_accept(self, token_id: int) -> bool:
        """Move on by a token if the grammar allows it; returns whether it did."""
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens (rejected drafts)."""
        self._matcher.rollback(num_tokens)


class GuideCompiler:
    """Compiles guides for one tokenizer. vocab_size: rows of the model's head, which may exceed the tokenizer's."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._grammars: OrderedDict[Guide, xgrammar.CompiledGrammar] = OrderedDict()

    def start(self, guide: Guide, end_token_ids: Iterable[int]) -> GuideState:
        """A fresh state for one request.

        Raises RequestError naming guided_decoding_guide if the text is no grammar, or one that no token can begin
        (`root ::= root`).
        """
        import xgrammar

        state = GuideState(self._compile(guide), end_token_ids)
        bitmask = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        if not state.is_terminated:
            state.fill_mask(bitmask, 0)
        if state.is_terminated or not bitmask.any():
            raise RequestError(FIELD, f"not a usable {guide.type}: it admits no text")
        return state

    def _compile(self, guide: Guide) -> xgrammar.CompiledGrammar:
        with self._lock:
            grammar = self._grammars.get(guide)
            if grammar is None:
                try:
                    grammar = self._compile_new(guide)
                except (RuntimeError, ValueError, TypeError) as error:  # what xgrammar raises on a bad text
                    message = f"not a usable {guide.type}: {_reason(error)}"
                    raise RequestError(FIELD, message) from error
                self._grammars[guide] = grammar
                if len(self._grammars) > MAX_CACHED_GRAMMARS:
                    self._grammars.popitem(last=False)
            self._grammars.move_to_end(guide)
            return grammar

    def _compile_new(self, guide: Guide) -> xgrammar.CompiledGrammar:
        if self._compiler is None:  # decoding the vocabulary takes a while: only when the first guide arrives
            import xgrammar
            from transformers import PreTrainedTokenizerFast

            fast = PreTrainedTokenizerFast(tokenizer_object=self._tokenizer.backend)
            info = xgrammar.TokenizerInfo.from_huggingface(
                fast, vocab_size=self._vocab_size, stop_token_ids=self._eos_token_ids
            )
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_enabled=False)
        if guide.type == "json":
            return self._compiler.compile_builtin_json_grammar()
        if not guide.text.strip():
            raise ValueError("the text is empty")
        compile_text: dict[str, Callable[[str], xgrammar.CompiledGrammar]] = {
            "json_schema": self._compile_schema,
            "regex": self._compiler.compile_regex,
            "ebnf_grammar": self._compiler.compile_grammar,
        }
        return compile_text[guide.type](guide.text)

    def _compile_schema(self, text: str) -> xgrammar.CompiledGrammar:
        import xgrammar

        if not isinstance(json.loads(text), (dict, bool)):
            raise ValueError("a JSON schema is an object or a boolean")
        assert self._compiler is not None
        grammar = xgrammar.Grammar.from_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE)
        rules = str(grammar)
        if _LAX_CHARACTER in rules and "Regex(" not in rules:  # a Regex rule cannot be read back from its text
            grammar = xgrammar.Grammar.from_ebnf(rules.replace(_LAX_CHARACTER, _STRICT_CHARACTER))
        return self._compiler.compile_grammar(grammar)


class GuideMasks:
    """The step's bitmasks: filled on the CPU for guided rows only, copied and applied in one go. Engine thread."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._bitmask = torch.empty(0, 0, dtype=torch.int32)

    def apply(
        self, logits: torch.Tensor, requests: list[Request], rows: list[int], paths: Paths | None = None
    ) -> GuideFailures:
        """Set forbidden logits to -inf in place; row r of logits [num_rows, vocab] fp32 belongs to requests[r].

        paths: the drafts that lead to each row; the matcher goes along them and comes back.
        """
        import xgrammar

        if self._bitmask.shape[0] < logits.shape[0]:
            bitmask = xgrammar.allocate_token_bitmask(max(8, 2 * logits.shape[0]), self._vocab_size)
            self._bitmask = bitmask.pin_memory() if self._device.type == "cuda" else bitmask
        masked: list[int] = []
        failures = GuideFailures()
        walk = _Walk()
        for row in rows:
            path = paths[row] if paths else ()
            try:
                if walk.go(requests[row].guide_state, path) and self._fill(requests[row].guide_state, row):
                    masked.append(row)
                elif path:  # where no token may follow, no draft is taken
                    failures.dead_rows.add(row)
                else:
                    failures.requests.append((requests[row], RequestError(FIELD, DEAD_END)))
            except RuntimeError as error:  # what xgrammar raises
                failures.requests.append((requests[row], EngineError(f"guided decoding failed: {_reason(error)}")))
        walk.end()
        if masked:
            bitmask = self._bitmask[: logits.shape[0]].to(self._device)  # `indices` skips the rows that hold old bits
            xgrammar.apply_token_bitmask_inplace(logits, bitmask, vocab_size=self._vocab_size, indices=masked)
        return failures

    def _fill(self, state: GuideState, row: int) -> bool:
        """False: no token may follow."""
        state.fill_mask(self._bitmask, row)
        return bool(self._bitmask[row].any())


@dataclass(slots=True)
class GuideFailures:
    """requests: whose grammar failed, with the error; their rows are left alone. dead_rows: of drafts that the grammar
    forbids, or after which nothing may come."""

    requests: list[tuple[Request, SlipstreamError]] = field(default_factory=list)
    dead_rows: set[int] = field(default_factory=set)


class _Walk:
    """Goes from row to row of a tree of drafts, taking back only what the next row does not share."""

    def __init__(self) -> None:
        self._state: GuideState | None = None
        self._taken: list[int] = []

    def go(self, state: GuideState, path: tuple[int, ...]) -> bool:
        """Stand at the end of `path`. False: the grammar forbids it, or it ends the text."""
        if state is not self._state:
            self.end()
            self._state = state
        shared = 0
        while shared < min(len(self._taken), len(path)) and self._taken[shared] == path[shared]:
            shared += 1
        self._back_to(shared)
        for token_id in path[shared:]:
            if state.is_terminated or not state.may_accept(token_id):
                return False
            self._taken.append(token_id)
        return not (path and state.is_terminated)

    def end(self) -> None:
        self._back_to(0)

    def _back_to(self, num_tokens: int) -> None:
        if self._state is not None and len(self._taken) > num_tokens:
            self._state.rollback(len(self._taken) - num_tokens)
            del self._taken[num_tokens:]


def _reason(error: BaseException) -> str:
    """The first line of xgrammar's message without its time stamp and source position."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", lines[0])[:300] if lines else type(error).__name__
