"""The exact bytes of tokens, for `logprobs`: a token may be part of a character, which text cannot represent.

Built at the first request that asks for log-probabilities; immutable afterwards.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

from slipstream.tokenizer.token_table import TokenTable, build_token_table


class TokenBytes:
    """folder: that of tokenizer.json; None: use the engine's text instead."""

    def __init__(self, folder: Path | None) -> None:
        self._file = folder / "tokenizer.json" if folder is not None else None

    def prepare(self) -> None:
        """Build the table. Takes up to a second: do not call it on the event loop."""
        _ = self._table

    def of(self, token_id: int, text: str) -> list[int]:
        table = self._table
        piece = table.pieces[token_id] if table is not None and token_id < len(table.pieces) else text
        return list(
            piece if isinstance(piece, bytes) else (text if piece is None else piece).encode("utf-8", "replace")
        )

    @cached_property
    def _table(self) -> TokenTable | None:
        if self._file is None or not self._file.is_file():
            return None
        from tokenizers import Tokenizer

        backend = Tokenizer.from_file(str(self._file))
        special = [token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special]
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
        return build_token_table(backend.get_vocab(with_added_tokens=True), decoder, special)
