"""A Llama checkpoint of a few hundred thousand random weights with a real tokenizer, made in well under a second."""

from __future__ import annotations

from pathlib import Path

import torch
from toy_tokenizers import byte_level
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)
    return folder
