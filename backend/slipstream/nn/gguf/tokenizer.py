"""The tokenizer inside a GGUF file -> tokenizer.json and tokenizer_config.json.

Byte-level BPE is built from the file's pieces and merges; which pattern splits a text first is known by the name in
`tokenizer.ggml.pre`, so an unknown name is refused: another pattern would give other tokens, silently.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from slipstream.core.errors import ConfigError
from slipstream.nn.convert.pieces import CONTROL, NORMAL, USER_DEFINED, Pieces, build
from slipstream.nn.gguf.metadata import Metadata

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = rf"{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}"
_QWEN2_SPLIT = rf"{_WORDS}|\p{{N}}|{_MARKS}"


def _byte_level(split: str | None = None, digits: bool = False) -> pre_tokenizers.PreTokenizer:
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if split is not None:
        steps.append(pre_tokenizers.Split(Regex(split), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    return pre_tokenizers.Sequence(steps)


PRE_TOKENIZERS = {
    "gpt-2": lambda: _byte_level(),
    "default": lambda: _byte_level(),
    "smollm": lambda: _byte_level(digits=True),
    "llama-bpe": lambda: _byte_level(_LLAMA3_SPLIT),
    "llama3": lambda: _byte_level(_LLAMA3_SPLIT),
    "qwen2": lambda: _byte_level(_QWEN2_SPLIT),
}


def write_tokenizer(metadata: Metadata, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (chat template).  Raises ConfigError for other kinds."""
    makers = {"gpt2": _byte_level_bpe, "llama": _sentencepiece}
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in makers:
        raise metadata.error(f"tokenizer of kind {kind} in a GGUF file; accepted: gpt2 (byte-level BPE), llama (SPM)")
    try:
        tokenizer = makers[kind](metadata)
    except ConfigError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise metadata.error(f"the tokenizer of the GGUF file cannot be built: {error}") from error
    tokenizer.save(str(folder / "tokenizer.json"))
    pieces = metadata.get("tokenizer.ggml.tokens")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        if (token_id := metadata.token_id(key)) is not None:
            config[name] = pieces[token_id]
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def _byte_level_bpe(metadata: Metadata) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise metadata.error(
            f"tokenizer.ggml.pre {name} is not known; accepted: {', '.join(PRE_TOKENIZERS)}, "
            "or the parameter tokenizer with a folder that holds the model's tokenizer.json"
        )
    pieces = metadata.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=name in ("llama-bpe", "llama3")))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(metadata, tokenizer)
    begins = metadata.get("tokenizer.ggml.add_bos_token", name in ("llama-bpe", "llama3"))
    front = _bos_in_front(metadata) if begins else []
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), *front])
    return tokenizer


def _add_tokens(metadata: Metadata, tokenizer: Tokenizer) -> None:
    """Declare the tokens that a text is never split inside; the special ones are left out of what clients read."""
    pieces, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type", ())
    for piece, kind in zip(pieces, kinds):
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(piece, special=kind == CONTROL, normalized=False)])


def _sentencepiece(metadata: Metadata) -> Tokenizer:
    """Llama 2's and Mistral's: words marked by U+2581, byte tokens for what the vocabulary lacks."""
    pieces, scores = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.scores", ())
    if len(scores) != len(pieces):
        raise metadata.error(f"{len(scores)} scores for {len(pieces)} pieces of the tokenizer; accepted: one each")
    tokenizer = build(
        Pieces(
            pieces,
            scores,
            metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(pieces)),
            unknown=pieces[metadata.token_id("unknown") or 0],
            has_prefix=metadata.get("tokenizer.ggml.add_space_prefix", True),
        )
    )
    if metadata.get("tokenizer.ggml.add_bos_token", True):
        tokenizer.post_processor = processors.Sequence(_bos_in_front(metadata))
    return tokenizer


def _bos_in_front(metadata: Metadata) -> list[Any]:
    """The step that puts the first token before a text; none if the file names no such token."""
    token_id = metadata.token_id("bos")
    if token_id is None:
        return []
    first = metadata.get("tokenizer.ggml.tokens")[token_id]
    pair = f"{first} $A {first}:1 $B:1"
    return [processors.TemplateProcessing(single=f"{first} $A", pair=pair, special_tokens=[(first, token_id)])]
