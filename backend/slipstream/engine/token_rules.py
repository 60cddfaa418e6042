"""Ends requests whose own rules leave no token: allowed tokens, bad words and a grammar may forbid all. Engine thread.

Sampling always draws a token, of the grammar if there is one. So a drawn token that breaks a rule means that all did:
the request ends with an error in front of it, and the others of the step do not notice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.core.bad_words import BadWords
from slipstream.core.errors import RequestError, SlipstreamError
from slipstream.core.finish import end_token_ids
from slipstream.core.outputs import StepOutput, StepOutputs
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.word_automaton import ROOT

ALLOWED, WORDS = "allowed_token_ids", "bad_words"


@dataclass(slots=True)
class _Rule:
    """ends: with a grammar, tokens that end a complete text, which may do so unlisted. state: of the bad words'
    automaton after num_tokens."""

    params: SamplingParams
    words: BadWords
    ends: frozenset[int]
    state: int = ROOT
    num_tokens: int = 0

    def broken_by(self, token_id: int) -> str:
        """The setting that forbids the next token, "" if none does; advances past a token that may follow."""
        if token_id in self.ends:
            return ""
        if not self.params.allows(token_id):
            return ALLOWED
        if self.words.bans(self.state, token_id):
            return WORDS
        self.state = self.words.step(self.state, token_id)
        self.num_tokens += 1
        return ""

    def error(self, field: str) -> RequestError:
        settings = {
            "allowed_token_ids": self.params.allowed_token_ids,
            "bad words": self.params.bad_words_ids,
            "the grammar": self.params.guide,
        }
        others = " and ".join(name for name, value in settings.items() if value)
        accepted = "accepted: settings that leave a token, or the text's end, after every text"
        return RequestError(field, f"no token is left after {self.num_tokens} tokens by {others}, {accepted}")


class TokenRules:
    """The rules of the engine's requests."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rules: dict[int, _Rule] = {}  # by sequence id; while empty, outputs are not inspected

    def start(self, requests: Iterable[Request]) -> None:
        for request in requests:
            params = request.params
            if _may_leave_nothing(params, self._vocab_size):
                ends = end_token_ids(request) if params.guide is not None else frozenset[int]()
                self._rules[request.sequence_id] = _Rule(params, params.bad_words_automaton, ends)

    def enforce(self, committed: StepOutputs) -> list[tuple[Request, SlipstreamError]]:
        """Cut a step's outputs in front of tokens that break a rule. Returns the requests that have to end, with the
        error; those that such a token has ended are told of it in its output."""
        broken: list[tuple[Request, SlipstreamError]] = []
        for output in committed if self._rules else ():
            rule = self._rules.get(output.request.sequence_id)
            error = None if rule is None else _cut(output, rule)
            if error is None:
                continue
            if output.request.is_finished:
                _end_with(output, error)
            else:
                broken.append((output.request, error))
        return broken

    def forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids if self._rules else ():
            self._rules.pop(sequence_id, None)


def check_rules(params: SamplingParams) -> None:
    """Raises RequestError for allowed tokens that are all bad words. Call it once bad words are ids."""
    allowed, alone = params.allowed_token_ids, {word[0] for word in params.bad_words_ids if len(word) == 1}
    if allowed and alone.issuperset(allowed):
        raise RequestError(ALLOWED, "all of them are bad words, accepted: at least one that is none")


def _may_leave_nothing(params: SamplingParams, vocab_size: int) -> bool:
    kinds = params.allowed_token_ids, params.bad_words_ids, params.guide
    return sum(map(bool, kinds)) > 1 or len(params.bad_words_ids) >= vocab_size


def _cut(output: StepOutput, rule: _Rule) -> RequestError | None:
    for index, token_id in enumerate(output.new_token_ids):
        if field := rule.broken_by(token_id):
            output.new_token_ids = output.new_token_ids[:index]  # a new list: the step's own is still read
            return rule.error(field)
    return None


def _end_with(output: StepOutput, error: RequestError) -> None:
    """Make an error of the end of a request, which came with the very token."""
    request = output.request
    request.finish_reason = output.finish_reason = FinishReason.ERROR
    request.stop_reason, request.error = None, str(error)
    output.error, output.fault = str(error), type(error)
