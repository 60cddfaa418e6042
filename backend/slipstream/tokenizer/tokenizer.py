"""The tokenizer of a checkpoint, through the `tokenizers` library: text to ids, ids to text, and its token table.

Immutable once loaded; any thread may call it. Imports neither torch nor transformers, so that processes of the tokenize
and detokenize tasks stay small, except for checkpoints with vocab.json and merges.txt alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from tokenizers import Tokenizer

from slipstream.core.errors import ConfigError
from slipstream.core.lfs_pointer import lfs_advice
from slipstream.tokenizer.stated_tokens import StatedTokens
from slipstream.tokenizer.token_table import CUT, TokenTable, build_token_table, character_endings, table_agrees

logger = logging.getLogger(__name__)

_SHORT_CHARS = 1024  # up to here encoding takes less time than releasing and reacquiring the GIL
_LIKELY_CHARS = 8  # characters per token; only white space and rulers have more
_CUT_WINDOW = 4096  # characters in which a cut point is searched
_LIKELY_BYTES = 4  # per token; most texts have more, or they are short
_PIECE_CHARS = 16384  # encoded at once, to count tokens: the library takes some 380 bytes of memory for each
_KINDS = "er1 \n\t.'\u4e2d"  # kinds of characters; every vocabulary merges "er"


class TextTokenizer:
    """Implements detokenizer.Tokenizer. token_table is None for decoders that only the library can run.

    max_token_bytes: length in bytes of the longest token. can_cut: the tokens of a text begin with the tokens of the
    part before any cut point. eos_token_id: of the token that ends a text, None if the checkpoint does not name it.
    """

    def __init__(self, backend: Tokenizer, eos_token_id: int | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.eos_token_id = eos_token_id
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
        table = build_token_table(vocabulary, decoder, self.special_ids)
        if table is not None and not table_agrees(table, self.decode):
            logger.warning("the tokenizer's decoder differs from its table of pieces: decoding by windows, slower")
            table = None
        self._table = table
        self.character_endings = character_endings(vocabulary, self.decode)
        spelled = max((len(token.encode("utf-8")) for token in vocabulary), default=0)
        self.max_token_bytes = table.max_bytes if table is not None else spelled
        self.can_cut = table is not None and not table.spans_cuts and self._cuts_cleanly()

    @classmethod
    def load(cls, path: str | Path) -> TextTokenizer:
        """Load a checkpoint folder, or its tokenizer.json; tokenizer_config.json beside it is read in both cases.

        Raises ConfigError if it cannot be read.
        """
        folder = Path(path)
        file = folder / "tokenizer.json" if folder.is_dir() else folder
        try:
            backend = Tokenizer.from_file(str(file)) if file.is_file() else _convert(folder)
        except ConfigError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(
                "tokenizer", str(path), f"tokenizer.json cannot be read: {error}{lfs_advice(file)}"
            ) from error
        stated = StatedTokens(file.parent)
        stated.put_around(backend)
        return cls(backend, stated.eos_token_id(backend))

    @property
    def token_table(self) -> TokenTable | None:
        return self._table

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text. Long texts go as a batch of one, which releases the GIL; the library's `encode` holds it."""
        if len(text) <= _SHORT_CHARS:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        (encoded,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text without special tokens."""
        if not texts:
            return []
        return [one.ids for one in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def surely_exceeds(self, text: str, max_tokens: int) -> int:
        """Length in characters of a prefix with more than max_tokens tokens; 0 if none was found.

        Encodes prefixes that double in length, so the work is proportional to max_tokens, not to the text.
        """
        if num_chars := self._far_exceeds(text, max_tokens):
            return num_chars
        size = _LIKELY_CHARS * max_tokens
        while self.can_cut and size < len(text):
            start = max(0, size - _CUT_WINDOW)
            cuts = [match.end() for match in CUT.finditer(text, start, size + 1)]
            if cuts and len(self.encode(text[: cuts[-1]], False)) > max_tokens:
                return cuts[-1]
            size *= 2
        return 0

    def _far_exceeds(self, text: str, max_tokens: int) -> int:
        """Likewise of a prefix with more than twice as many tokens, which is sure wherever the text is cut: a cut
        changes a few tokens on each side. Memory is that of a piece, so that encoding the rest has an end, too.

        Source of the bound on what a cut changes: Berglund and van der Merwe, arXiv:2309.08715.
        """
        if len(text.encode("utf-8")) <= max(_PIECE_CHARS, _LIKELY_BYTES * max_tokens):
            return 0
        num_tokens = 0
        for start in range(0, len(text), _PIECE_CHARS):
            num_tokens += len(self.encode(text[start : start + _PIECE_CHARS], False))
            if num_tokens > 2 * max_tokens:
                return min(len(text), start + _PIECE_CHARS)
        return 0

    def _cuts_cleanly(self) -> bool:
        """Whether the tokens of short sample texts begin with those of their part before the cut point.

        No token spans a cut point, so no merge does; this checks the normaliser and the pre-tokenizer.
        """
        befores = ["".join(chars) for size in (1, 2, 3) for chars in product(_KINDS, repeat=size) if chars[-1] in "er1"]
        texts = [before + " " + after for before in befores for after in ("", *_KINDS)]
        encoded = iter(self.encode_all([*befores, *texts]))
        firsts = [next(encoded) for _ in befores]
        return all(next(encoded)[: len(first)] == first for first in firsts for _ in ("", *_KINDS))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode as a batch of one, which releases the GIL: an echoed prompt may be long."""
        (text,) = self.backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Decode one token with special tokens shown and incomplete characters as U+FFFD (for log-probabilities)."""
        table = self._table
        if table is None:
            return self.decode([token_id], False)
        piece = table.pieces[token_id] if token_id < len(table.pieces) else None
        return piece.decode("utf-8", "replace") if isinstance(piece, bytes) else piece or ""


def _convert(path: Path) -> Tokenizer:
    """Load a checkpoint without tokenizer.json (vocab.json and merges.txt) through transformers."""
    accepted = "a folder with tokenizer.json (or a tokenizer that transformers can convert), or the file itself"
    if not path.is_dir():
        raise ConfigError("tokenizer", str(path), f"not found; accepted: {accepted}")
    if any((path / name).is_file() for name in ("tokenizer.model", "tiktoken.model")) or any(path.glob("*.tiktoken")):
        once = f"`slipstream convert {path} OUTPUT` writes tokenizer.json once"
        raise ConfigError("tokenizer", str(path), f"the tokenizer is in the form of sentencepiece or tiktoken: {once}")
    if not any(path.glob("*token*")) and not any(path.glob("vocab.*")):
        raise ConfigError("tokenizer", str(path), f"the folder holds no tokenizer; accepted: {accepted}")
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(path), local_files_only=True).backend_tokenizer
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError("tokenizer", str(path), f"{reason}; accepted: {accepted}") from error
