"""What tokenizer_config.json says beside a tokenizer.json: the token that ends a text, and those put around a prompt.

Standard library and `tokenizers` only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from slipstream.core.errors import ConfigError

# whose Hugging Face class in transformers 4 puts tokens around a text by its settings; 5 reads tokenizer.json alone
LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
CONFIG_FILE, MAP_FILE = "tokenizer_config.json", "special_tokens_map.json"


class StatedTokens:
    """What a checkpoint folder states. Raises ConfigError for a file that is not a JSON object."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._settings = _read(folder / CONFIG_FILE)
        self._names = {**_read(folder / MAP_FILE), **self._settings}

    def eos_token_id(self, backend: Tokenizer) -> int | None:
        """The id of the eos_token, None if the folder names none that the vocabulary has."""
        text = self._text("eos_token")
        return None if text is None else backend.token_to_id(text)

    def put_around(self, backend: Tokenizer) -> None:
        """Replace what tokenizer.json puts around a text, if a tokenizer of Llama's kind states add_bos_token or
        add_eos_token: DeepSeek-V3, R1 and the models distilled from it have their first token here alone. The one
        that is not stated stays as tokenizer.json has it.

        Raises ConfigError for a value that is neither true nor false and for a token that the vocabulary lacks.
        """
        is_stated = {"add_bos_token", "add_eos_token"} & self._settings.keys()
        if not is_stated or self._settings.get("tokenizer_class") not in LLAMA_CLASSES:
            return
        first, last = _ends(backend)
        before, after = self._tokens(backend, "bos_token", first), self._tokens(backend, "eos_token", last)
        single = [*before, "$A", *after]
        pair = [*single, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)]
        special_tokens = list({**before, **after}.items())
        backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special_tokens)

    def _tokens(self, backend: Tokenizer, name: str, end: int | None) -> Mapping[str, int]:
        """The token of that name with its id, if it is put beside a text. end: the id that tokenizer.json has there."""
        key, text = f"add_{name}", self._text(name)
        token_id = None if text is None else backend.token_to_id(text)
        stated = self._settings.get(key, end is not None and end == token_id)
        if stated not in (True, False, None):
            raise ConfigError(f"{CONFIG_FILE} {key}", stated, "must be true or false")
        if not stated or text is None:
            return {}
        if token_id is None:
            raise ConfigError(f"{CONFIG_FILE} {name}", text, f"must be a token of tokenizer.json, as {key} is true")
        return {text: token_id}

    def _text(self, name: str) -> str | None:
        token = self._names.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        return text if isinstance(text, str) and text else None


def _ends(backend: Tokenizer) -> tuple[int | None, int | None]:
    """The ids that tokenizer.json puts before and behind a text, None for none."""
    plain, whole = (backend.encode("a", add_special_tokens=is_whole).ids for is_whole in (False, True))
    num_before = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0)
    has_after = len(whole) > num_before + len(plain)
    return whole[0] if num_before else None, whole[-1] if has_after else None


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("tokenizer", str(path), f"cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError("tokenizer", str(path), "must hold a JSON object")
    return values
