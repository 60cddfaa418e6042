"""Greedy texts by Hugging Face's own loop, which the engine's must equal."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def greedy_continuation(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """The token ids after the prompt, up to an end token or max_tokens of them."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return output[0, len(prompt) :].tolist()


def greedy_continuations(checkpoint: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Texts of max_tokens each, one prompt at a time, in float32. They differ: texts that agree would prove nothing."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    texts = [greedy_continuation(model, prompt, max_tokens) for prompt in prompts]
    assert len({tuple(text) for text in texts}) == len(prompts)
    return texts
