"""Stop conditions on token ids: end of sequence, stop ids, stop words as ids, length limits.

Engine thread. The output thread matches stop strings on text and then requests `Scheduler.finish`.
"""

from __future__ import annotations

from slipstream.core.request import FinishReason, Request
from slipstream.core.word_automaton import NO_WORDS, ROOT


def end_token_ids(request: Request) -> frozenset[int]:
    """The end-of-sequence tokens of a request: its end_id (-1: none, as in TensorRT-LLM), else the checkpoint's."""
    end_id = request.params.end_id
    if request.params.ignore_eos:
        return frozenset()
    if end_id is None:
        return request.eos_token_ids
    return frozenset((end_id,)) if end_id >= 0 else frozenset()


class StopConditions:
    """The stop conditions of one request, precomputed: a token costs one set look-up and one comparison.

    min_len, max_len: prompt + output tokens; max_len respects max_model_len. No token stops below min_len, except an
    end-of-sequence token of a request with a grammar. Sampling bans these tokens below min_len, so one is drawn there
    only if the grammar allows nothing else: the text is complete.
    """

    __slots__ = ("_eos_len", "_eos_token_ids", "_word_state", "_words", "has_words", "max_len", "min_len", "token_ids")

    def __init__(self, request: Request, max_model_len: int) -> None:
        params = request.params
        self._eos_token_ids = end_token_ids(request)
        self._words = params.stop_words_automaton if params.stop_words_ids else NO_WORDS
        self._word_state = ROOT
        self.token_ids = self._eos_token_ids | frozenset(params.stop_token_ids)
        self.has_words = bool(params.stop_words_ids)
        self.min_len = request.num_prompt_tokens + params.min_tokens
        self._eos_len = self.min_len if params.guide is None else 0  # from which on an end-of-sequence token stops
        self.max_len = min(request.max_num_tokens, max_model_len)

    @property
    def max_slots(self) -> int:
        """KV slots that the request may come to need, for all tokens but the last, which no step computes."""
        return self.max_len - 1

    def extend(self, request: Request, new_token_ids: list[int]) -> bool:
        """Append tokens to the request up to the one that ends it; truncate new_token_ids after that one.

        Returns whether the request ended; finish_reason and stop_reason are then set.
        """
        token_ids, stop_ids, max_len, has_words = request.token_ids, self.token_ids, self.max_len, self.has_words
        if len(new_token_ids) == 1 and not has_words:  # nearly always
            token_ids += new_token_ids
            return (len(token_ids) >= max_len or new_token_ids[0] in stop_ids) and self.is_over(request)
        if not has_words and len(token_ids) + len(new_token_ids) < max_len and stop_ids.isdisjoint(new_token_ids):
            token_ids += new_token_ids
            return False
        for index, token_id in enumerate(new_token_ids):
            token_ids.append(token_id)
            if has_words:
                self._word_state = self._words.step(self._word_state, token_id)
            may_stop = token_id in stop_ids or has_words or len(token_ids) >= max_len
            if may_stop and self.is_over(request):
                del new_token_ids[index + 1 :]
                return True
        return False

    def is_over(self, request: Request) -> bool:
        """Whether the last token of request.token_ids ends the request; if so, set finish_reason and stop_reason.

        stop_reason: the token id that completed a match, None for an end-of-sequence token or a length limit.
        """
        token_ids = request.token_ids
        token_id = token_ids[-1]
        if len(token_ids) >= self._eos_len and token_id in self._eos_token_ids:
            request.finish_reason = FinishReason.STOP
            return True
        is_stop = token_id in self.token_ids or (self.has_words and self._words.ends[self._word_state] >= 0)
        if is_stop and len(token_ids) >= self.min_len:
            request.finish_reason = FinishReason.STOP
            request.stop_reason = token_id
            return True
        if len(token_ids) >= self.max_len:
            request.finish_reason = FinishReason.LENGTH
            return True
        return False
