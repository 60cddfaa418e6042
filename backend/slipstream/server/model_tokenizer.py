"""A model's tokenizer in the gateway: the exact bytes of tokens for `logprobs`, and /tokenize and /detokenize.

A token may be part of a character, which text cannot represent. Loaded at the first request that needs it; immutable
afterwards.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from slipstream.server.errors import RETRY_AFTER_S, ApiError
from slipstream.tokenizer.tokenizer import TextTokenizer

NUM_THREADS = 2
MAX_WAITING_CHARS = 4 << 20  # characters or tokens of an API key's requests at once: some two seconds of a thread
MAX_TOKENIZED_AT_ONCE = 64 << 10  # characters or tokens; of longer texts, up to 0.6 GB each, one at a time
T = TypeVar("T")


class TokenizerThreads:
    """Threads for the texts of /tokenize, so that nothing else waits for these. Used on the event loop's thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, "tokenize")
        self._long_texts = ThreadPoolExecutor(1, "tokenize-long")
        self._waiting: Counter[bytes] = Counter()

    async def run(self, owner: bytes, size: int, work: Callable[[], T]) -> T:
        """owner: of the API key. size: of the text in characters or tokens. Raises ApiError (429)."""
        if self._waiting[owner] and self._waiting[owner] + size > MAX_WAITING_CHARS:
            message = (
                f"{self._waiting[owner]} characters of this key are being tokenized, accepted: {MAX_WAITING_CHARS}"
            )
            raise ApiError(429, f"{message}; try again later", code="rate_limit_exceeded", retry_after_s=RETRY_AFTER_S)
        self._waiting[owner] += size
        try:
            pool = self._pool if size <= MAX_TOKENIZED_AT_ONCE else self._long_texts
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        finally:
            self._waiting[owner] -= size
            if not self._waiting[owner]:
                del self._waiting[owner]

    def close(self) -> None:
        for pool in (self._pool, self._long_texts):
            pool.shutdown(wait=False, cancel_futures=True)


class ModelTokenizer:
    """folder: that of tokenizer.json; None: bytes are those of the engine's text, and nothing is tokenised."""

    def __init__(self, folder: Path | None) -> None:
        file = folder / "tokenizer.json" if folder is not None else None
        self._file = file if file is not None and file.is_file() else None

    def prepare(self) -> None:
        """Load it. Takes up to a second: do not call it on the event loop."""
        _ = self._tokenizer

    @property
    def is_there(self) -> bool:
        return self._file is not None

    def count(self, texts: list[str]) -> int:
        """Tokens of these texts. Takes a second for some megabytes: do not call it on the event loop."""
        return sum(len(self.loaded().encode(text, add_special_tokens=False)) for text in texts)

    def bytes_of(self, token_id: int, text: str) -> list[int]:
        """text: what the engine shows of the token, for a token without exact bytes."""
        tokenizer = self._tokenizer
        table = tokenizer.token_table if tokenizer is not None else None
        piece = table.pieces[token_id] if table is not None and token_id < len(table.pieces) else text
        return list(
            piece if isinstance(piece, bytes) else (text if piece is None else piece).encode("utf-8", "replace")
        )

    def loaded(self) -> TextTokenizer:
        """Raises ApiError (400) if the gateway has no file of it."""
        if self._tokenizer is None:
            message = (
                "the gateway has no tokenizer.json of this model; start it with --checkpoint or --model-repository"
            )
            raise ApiError(400, f"model: {message}", param="model")
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> TextTokenizer | None:
        return TextTokenizer.load(self._file) if self._file is not None else None
