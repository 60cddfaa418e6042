"""`slipstream convert` of tiktoken's files: tiktoken's own ids, with the special tokens that are in a model's code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from slipstream.core.errors import ConfigError
from slipstream.nn.convert import tiktoken_ranks
from slipstream.nn.convert.folder import convert_folder
from slipstream.tokenizer.tokenizer import TextTokenizer
from tokenizer_texts import HARD_TEXTS, random_texts, write_ranks

FILES = {"chatglm": "tokenizer.model", "qwen": "qwen.tiktoken", "kimi_k2": "tiktoken.model"}
ARCHITECTURES = {"chatglm": "ChatGLMModel", "qwen": "QWenLMHeadModel", "kimi_k2": "DeepseekV3ForCausalLM"}
SPECIAL = {  # in the order of their ids, behind the ranks
    "chatglm": ("<|endoftext|>", "[MASK]", "[gMASK]", "<sop>"),
    "qwen": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "kimi_k2": ("[BOS]", "[EOS]", "<|im_end|>"),
}


def write_folder(folder: Path, name: str, model_type: str, **settings: object) -> dict[bytes, int]:
    """A model without weights worth the name. Returns its ranks. settings: of tokenizer_config.json."""
    ranks = write_ranks(folder / FILES[name])
    (folder / "config.json").write_text(json.dumps({"architectures": [ARCHITECTURES[name]], "model_type": model_type}))
    torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")
    if name != "qwen":  # whose tokens are in its code alone
        decoder = {
            str(len(ranks) + index): {"content": token, "special": True} for index, token in enumerate(SPECIAL[name])
        }
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder, **settings}))
    return ranks


@pytest.mark.parametrize("name", tiktoken_ranks.PATTERNS)
def test_ids_are_tiktokens_own(name: str, tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    ranks = write_folder(tmp_path, name, name)
    convert_folder(tmp_path, tmp_path / "made")
    ours = TextTokenizer.load(tmp_path / "made")
    special = {token: len(ranks) + index for index, token in enumerate(SPECIAL[name])}
    pattern = tiktoken_ranks.PATTERNS[name]
    theirs = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    for text in [*HARD_TEXTS, "HTTPServer's 你好World 漢字カナ ab中c'Ll", *random_texts(400)]:
        ids = theirs.encode_ordinary(text)
        assert ours.encode(text, False) == ids, text
        assert ours.decode(ids, False) == theirs.decode(ids)
    for token, token_id in special.items():
        assert ours.encode(token, False) == [token_id] == theirs.encode(token, allowed_special="all")
    front = [special["[gMASK]"], special["<sop>"]] if name == "chatglm" else []
    assert ours.encode("fox") == [*front, *theirs.encode("fox")]


@pytest.mark.parametrize("code", ["tokenization_kimi.TikTokenTokenizer", "tokenization_moonshot.TikTokenTokenizer"])
def test_moonshot_s_tokenizer_is_known_by_its_code(code: str, tmp_path: Path) -> None:
    """Moonlight's model_type is DeepSeek-V3's. Tokens without a name have one by their id."""
    ranks = write_folder(tmp_path, "kimi_k2", "deepseek_v3", auto_map={"AutoTokenizer": [code, None]})
    convert_folder(tmp_path, tmp_path / "made")
    ours = TextTokenizer.load(tmp_path / "made")
    last = len(ranks) + tiktoken_ranks.NUM_KIMI_TOKENS - 1
    assert ours.encode(f"<|im_end|><|reserved_token_{last}|>", False) == [len(ranks) + 2, last]
    write_folder(tmp_path, "kimi_k2", "deepseek_v3", auto_map={"AutoTokenizer": "tokenization_other.Tokenizer"})
    with pytest.raises(ConfigError, match=r"model_type 'deepseek_v3' .* has no known pattern; accepted: chatglm, qwen"):
        convert_folder(tmp_path, tmp_path / "other")


def test_a_folder_to_convert_says_so_when_it_is_loaded(tmp_path: Path) -> None:
    write_folder(tmp_path, "kimi_k2", "kimi_k2")
    with pytest.raises(ConfigError, match=r"sentencepiece or tiktoken: `slipstream convert .* writes tokenizer\.json"):
        TextTokenizer.load(tmp_path)
