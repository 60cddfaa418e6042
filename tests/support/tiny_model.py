"""A Llama checkpoint of a few hundred thousand random weights with a real tokenizer, made in well under a second."""

from __future__ import annotations

from pathlib import Path

import torch
from toy_tokenizers import byte_level
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHAT_TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}\n{% endfor %}"


def make_tiny_llama(
    folder: Path,
    max_position_embeddings: int = 512,
    seed: int = 0,
    head_dim: int = 16,
    num_layers: int = 2,
    hidden_size: int = 64,
) -> Path:
    """Weights are drawn wide, so that greedy text wanders through the vocabulary instead of repeating one token."""
    tokenizer = byte_level()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size() + 11,  # heads are often wider than the vocabulary
        hidden_size=hidden_size,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.3,
        bos_token_id=tokenizer.token_to_id("<s>"),
        eos_token_id=tokenizer.token_to_id("</s>"),
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def make_tiny_windowed(folder: Path, window: int = 24) -> Path:
    """Qwen2 with a full layer and three that see a window: the hybrid KV cache has four groups. Sizes as above."""
    torch.manual_seed(5)
    config = Qwen2Config(
        vocab_size=byte_level().get_vocab_size() + 11,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.3,
        use_sliding_window=True,
        sliding_window=window,
        max_window_layers=1,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)
