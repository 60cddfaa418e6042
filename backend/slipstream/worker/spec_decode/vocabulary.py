"""Maps token ids between the vocabularies of a model and its draft model, by text; the identity if they are equal.

A draft model with another tokenizer can draft only the tokens that both have; their share is checked at load.
"""

from __future__ import annotations

import logging

import torch

from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.checkpoint_path import has_tokenizer, resolve_tokenizer
from slipstream.tokenizer.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

LEAST_SHARE = 0.5  # of the model's tokens, that the draft must have


class VocabularyMap:
    """draft_of: [target vocab] int64, the draft's token of the same text, or 0. is_shared: [target vocab] bool.

    Both None: the same vocabulary, though one model may have more unused rows than the other.
    """

    def __init__(
        self,
        vocab_size: int,
        draft_vocab_size: int,
        draft_of: torch.Tensor | None = None,
        is_shared: torch.Tensor | None = None,
    ) -> None:
        self._vocab_size, self._draft_vocab_size = vocab_size, draft_vocab_size
        self._draft_of, self._is_shared = draft_of, is_shared

    @classmethod
    def between(
        cls, target: ModelConfig, draft: ModelConfig, vocab_size: int, draft_vocab_size: int, device: torch.device
    ) -> VocabularyMap:
        """The sizes are rows of each model's matrices, which may be fewer than its tokenizer's tokens.

        A draft without a tokenizer of its own has the model's.
        Raises ConfigError if the draft knows too few of the model's tokens.
        """
        theirs = TextTokenizer.load(resolve_tokenizer(target.tokenizer or target.model)).backend.get_vocab()
        if not has_tokenizer(folder := resolve_tokenizer(draft.model)):
            return cls(vocab_size, draft_vocab_size)
        own = TextTokenizer.load(folder).backend.get_vocab()
        if own == theirs:
            return cls(vocab_size, draft_vocab_size)
        shared = {
            token_id: own[text]
            for text, token_id in theirs.items()
            if text in own and token_id < vocab_size and own[text] < draft_vocab_size
        }
        share = len(shared) / max(1, len(theirs))
        if share < LEAST_SHARE:
            known = f"its tokenizer has {share:.0%} of the model's tokens; accepted: {LEAST_SHARE:.0%} or more"
            raise ConfigError("draft_model", draft.model, known)
        logger.info("the draft has another tokenizer: %.0f %% of the model's tokens are in it", 100 * share)
        draft_of = torch.zeros(vocab_size, dtype=torch.int64)
        is_shared = torch.zeros(vocab_size, dtype=torch.bool)
        indices = torch.tensor(list(shared))
        draft_of[indices] = torch.tensor(list(shared.values()))
        is_shared[indices] = True
        return cls(vocab_size, draft_vocab_size, draft_of.to(device), is_shared.to(device))

    def to_draft(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The draft's token ids for the model's."""
        if self._draft_of is not None:
            return self._draft_of[token_ids]
        if self._draft_vocab_size < self._vocab_size:  # the model has more rows and may sample one of them
            return token_ids.clamp(max=self._draft_vocab_size - 1)
        return token_ids

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The draft's logits over the target's vocabulary, -inf for tokens that the draft lacks."""
        if self._draft_of is not None and self._is_shared is not None:
            return logits[:, self._draft_of].masked_fill(~self._is_shared, float("-inf"))
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self._vocab_size].contiguous()
