"""tokenizer.model (sentencepiece or tiktoken), tiktoken.model and *.tiktoken -> tokenizer.json and its config.

Python files of the folder are never run. Every id of the result is the one that the folder says; a contradiction is a
ConfigError, as another id would be another word, silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from slipstream.core.errors import ConfigError
from slipstream.nn.convert import sentencepiece_model, tiktoken_ranks
from slipstream.nn.convert.chat_templates import chat_template
from slipstream.nn.convert.output import check_size, read_json_if_there, write_json

TOKENIZER_BYTES = 32 << 20  # the largest published one has 6 MB
MAX_TOKEN_ID = 1 << 21
MAX_TOKEN_CHARS = 1024
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?$")
CHATGLM = ("ChatGLMModel", "ChatGLMForConditionalGeneration")
CHATGLM2_TOKENS = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
CHATGLM3_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")


@dataclass(frozen=True)
class Folder:
    """A folder's JSON files that say something about its tokenizer."""

    path: Path
    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    generation: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Folder:
        names = ("config.json", "tokenizer_config.json", "generation_config.json")
        return cls(path, *(read_json_if_there(path / name) for name in names))

    @property
    def is_chatglm(self) -> bool:
        return bool(set(self.config.get("architectures") or ()) & set(CHATGLM))

    def mentions(self, text: str) -> bool:
        """Whether the folder's tokenizer code, which is read but not run, holds a text."""
        file = self.path / "tokenization_chatglm.py"
        if not file.is_file():
            return False
        check_size(file, TOKENIZER_BYTES)
        return text in file.read_text("utf-8", "replace")


def has_tokenizer_to_convert(path: Path) -> bool:
    return not (path / "tokenizer.json").is_file() and _source(path) is not None


def convert_tokenizer(path: Path, output: Path) -> None:
    """Write a folder's tokenizer. Raises ConfigError, naming the file and what would be accepted."""
    folder, source = Folder.read(path), _source(path)
    assert source is not None, "asked before"
    check_size(source, TOKENIZER_BYTES)
    added = _added_tokens(folder)
    names: dict[str, str] = {}
    if _is_tiktoken(source):
        model_type = tiktoken_ranks.model_of(folder.config, folder.settings)
        tokenizer = tiktoken_ranks.read(source, model_type, added)
    else:
        if folder.is_chatglm:
            added = _with_chatglm(folder, added, sentencepiece_model.num_pieces(source))
        tokenizer, names = sentencepiece_model.read(source, added)
    _check_ids(tokenizer, added, source)
    names |= _token_names(folder)
    _put_in_front(tokenizer, folder, names)
    tokenizer.save(str(output / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {name: names[name] for name in TOKEN_NAMES if names.get(name)}
    has_file = (path / "chat_template.jinja").is_file()
    template = None if has_file else folder.settings.get("chat_template") or chat_template(
        folder.config, folder.generation, tokenizer
    )  # fmt: skip
    write_json(output / "tokenizer_config.json", {**settings, **({"chat_template": template} if template else {})})


def _source(path: Path) -> Path | None:
    files = [path / "tokenizer.model", path / "tiktoken.model", *sorted(path.glob("*.tiktoken"))]
    return next((file for file in files if file.is_file()), None)


def _is_tiktoken(source: Path) -> bool:
    with source.open("rb") as file:
        return _RANK_LINE.match(file.readline(1 << 16).rstrip(b"\n")) is not None


def _added_tokens(folder: Folder) -> dict[int, AddedToken]:
    """Tokens with the ids that added_tokens.json and tokenizer_config.json state."""
    stated: dict[Any, Any] = {
        token_id: {"content": text} for text, token_id in read_json_if_there(folder.path / "added_tokens.json").items()
    }
    section = folder.settings.get("added_tokens_decoder") or {}
    if not isinstance(section, dict):
        raise ConfigError("tokenizer_config.json added_tokens_decoder", section, "must be a JSON object")
    stated |= {int(name) if name.isdecimal() and len(name) < 12 else name: entry for name, entry in section.items()}
    tokens: dict[int, AddedToken] = {}
    for token_id, entry in sorted(stated.items(), key=lambda item: str(item[0])):
        text = entry.get("content") if isinstance(entry, dict) else None
        is_id = isinstance(token_id, int) and 0 <= token_id <= MAX_TOKEN_ID
        if not is_id or not isinstance(text, str) or not 0 < len(text) <= MAX_TOKEN_CHARS:
            accepted = f"ids up to {MAX_TOKEN_ID}, each with a text of 1 to {MAX_TOKEN_CHARS} characters"
            raise ConfigError("added_tokens", f"{token_id}: {entry}"[:200], f"accepted: {accepted}")
        tokens[token_id] = AddedToken(text, special=entry.get("special", True) is True, normalized=False)
    return dict(sorted(tokens.items()))


def _with_chatglm(folder: Folder, added: dict[int, AddedToken], num_pieces: int) -> dict[int, AddedToken]:
    """ChatGLM's tokens behind its pieces, which are in its code alone; the roles are ChatGLM3's."""
    texts = (*CHATGLM2_TOKENS, *(CHATGLM3_ROLES if folder.mentions(CHATGLM3_ROLES[1]) else ()))
    own = {num_pieces + index: AddedToken(text, special=True, normalized=False) for index, text in enumerate(texts)}
    return {**own, **added}


def _check_ids(tokenizer: Tokenizer, added: Mapping[int, AddedToken], source: Path) -> None:
    for token_id, token in added.items():
        if tokenizer.token_to_id(token.content) != token_id or tokenizer.id_to_token(token_id) != token.content:
            found = tokenizer.id_to_token(token_id)
            reason = f"{source.name} has {found!r} at id {token_id}, the folder's JSON files say {token.content!r}"
            raise ConfigError("tokenizer", str(source), reason)


def _token_names(folder: Folder) -> dict[str, str]:
    """bos_token and its like, as the folder names them."""
    names: dict[str, str] = {}
    for values in (read_json_if_there(folder.path / "special_tokens_map.json"), folder.settings):
        for name in TOKEN_NAMES:
            value = values.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str) and text:
                names[name] = text
    return names


def _put_in_front(tokenizer: Tokenizer, folder: Folder, names: Mapping[str, str]) -> None:
    """What belongs before a text that is no chat: ChatGLM's two tokens, else the first token if the folder has it."""
    front: Iterable[str] = ()
    if folder.is_chatglm:
        front = ("[gMASK]", "<sop>" if tokenizer.token_to_id("<sop>") is not None else "sop")
    elif folder.settings.get("add_bos_token", "LlamaTokenizer" in str(folder.settings.get("tokenizer_class"))):
        front = (names["bos_token"],) if "bos_token" in names else ()
    special = [(text, tokenizer.token_to_id(text)) for text in front]
    absent = [text for text, token_id in special if token_id is None]
    if absent:
        raise ConfigError("tokenizer", str(folder.path), f"has no token {absent[0]!r}, which begins its prompts")
    if special:
        pattern = " ".join((*front, "$A"))
        tokenizer.post_processor = processors.TemplateProcessing(single=pattern, special_tokens=special)
