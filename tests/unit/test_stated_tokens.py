"""What tokenizer_config.json says of the tokens around a text, and of the one that ends an answer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import toy_tokenizers
from slipstream.core.config import StructuredOutputConfig
from slipstream.core.errors import ConfigError
from slipstream.engine.input_processor import InputProcessor
from slipstream.nn.spec import DecoderSpec
from slipstream.tokenizer.tokenizer import TextTokenizer
from tokenizers import Tokenizer, processors

NAMES = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "tokenizer_class": "LlamaTokenizerFast"}


def write(folder: Path, kind: str = "byte_level", **settings: object) -> Path:
    if kind == "ended":
        backend = Tokenizer.from_str(toy_tokenizers.byte_level().to_str())
        end = ("</s>", backend.token_to_id("</s>"))
        backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[end])
    else:
        backend = getattr(toy_tokenizers, kind)()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("kind", "stated", "around"),
    [
        ("byte_level", {"add_bos_token": True}, (["<s>"], [])),
        ("byte_level", {"add_bos_token": True, "add_eos_token": True}, (["<s>"], ["</s>"])),
        ("byte_level", {}, ([], [])),
        ("byte_level", {"add_bos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"}, ([], [])),
        ("sentencepiece", {}, (["<s>"], [])),
        ("sentencepiece", {"add_bos_token": False}, ([], [])),
        ("sentencepiece", {"add_bos_token": None, "add_eos_token": True}, ([], ["</s>"])),
        ("sentencepiece", {"add_eos_token": False}, (["<s>"], [])),
        ("sentencepiece", {"add_eos_token": True}, (["<s>"], ["</s>"])),
        ("byte_level", {"add_eos_token": True}, ([], ["</s>"])),
        ("ended", {"add_bos_token": True}, (["<s>"], ["</s>"])),
        ("ended", {"add_bos_token": True, "add_eos_token": False}, (["<s>"], [])),
    ],
)
def test_llamas_settings_put_tokens_around_a_text(
    kind: str, stated: dict[str, object], around: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    """DeepSeek-V3's tokenizer.json puts nothing in front of a text; its tokenizer_config.json says add_bos_token."""
    folder = write(tmp_path, kind, **{**NAMES, **stated})
    for path in (folder, folder / "tokenizer.json"):
        tokenizer = TextTokenizer.load(path)
        plain = tokenizer.encode("Zwölf Boxkämpfer", add_special_tokens=False)
        before, after = ([tokenizer.backend.token_to_id(token) for token in tokens] for tokens in around)
        assert tokenizer.encode("Zwölf Boxkämpfer") == [*before, *plain, *after]


def test_names_may_be_in_the_map_of_special_tokens(tmp_path: Path) -> None:
    (write(tmp_path, tokenizer_class="LlamaTokenizer", add_bos_token=True) / "special_tokens_map.json").write_text(
        json.dumps(NAMES)
    )
    tokenizer = TextTokenizer.load(tmp_path)
    assert tokenizer.encode("a")[0] == tokenizer.backend.token_to_id("<s>")
    assert tokenizer.eos_token_id == tokenizer.backend.token_to_id("</s>")


def test_a_token_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert TextTokenizer.load(write(tmp_path, eos_token="<|end|>")).eos_token_id is None
    with pytest.raises(ConfigError, match=r"tokenizer_config.json bos_token='<\|begin\|>': must be a token"):
        TextTokenizer.load(write(tmp_path, **{**NAMES, "bos_token": "<|begin|>", "add_bos_token": True}))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json add_bos_token='yes': must be true or false"):
        TextTokenizer.load(write(tmp_path, **{**NAMES, "add_bos_token": "yes"}))


def test_the_tokenizers_end_token_ends_a_request(tmp_path: Path) -> None:
    """Models that were fine-tuned for chats often name the end of a turn there alone; config.json has the base's."""
    tokenizer = TextTokenizer.load(write(tmp_path, eos_token="<|user|>"))
    spec = cast(
        "DecoderSpec", SimpleNamespace(vocab_size=tokenizer.vocab_size, hidden_size=8, eos_token_ids=(1, 10**6))
    )
    limits = cast("Any", StructuredOutputConfig())
    assert InputProcessor(spec, tokenizer, limits).eos_token_ids == [1, tokenizer.backend.token_to_id("<|user|>")]
