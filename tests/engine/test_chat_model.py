"""SmolLM2-135M-Instruct, converted by our GGUF reader: greedy text is Hugging Face's on the same weights in fp32.

`python build/chat_model.py` fetches it. All 20 prompts with 100 tokens each take minutes on two cores: they are run
when SLIPSTREAM_LONG_TESTS=1 is set; otherwise three prompts with 12 tokens.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from huggingface_texts import greedy_continuation
from slipstream import LLM, SamplingParams
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).resolve().parents[2] / "install/models/SmolLM2-135M-Instruct"
IS_LONG = os.environ.get("SLIPSTREAM_LONG_TESTS") == "1"
NUM_TOKENS = 100 if IS_LONG else 12
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "Explain photosynthesis to a child.",
    "List three fruits that are red.",
    "What is 12 times 7?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "How does a bicycle stay upright?",
    "What is the difference between a lake and a pond?",
    "Name the planets of the solar system.",
    "Write a Python function that adds two numbers.",
    "Summarize the story of Cinderella in two sentences.",
    "What should I pack for a week in the mountains?",
    "Why do cats purr?",
    "How do I write a letter of complaint?",
    "What happened in 1969?",
    "Describe a sunset without using the word red.",
    "What is the boiling point of water in Fahrenheit?",
)

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="no chat model: run `python build/chat_model.py`")


def test_greedy_text_is_huggingface() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in (QUESTIONS if IS_LONG else QUESTIONS[:3])
    ]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    with LLM(str(FOLDER), device="cpu", dtype="float32", num_blocks=256) as llm:
        completions = llm.generate(prompts, params)
    reference = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    for completion in completions:
        expected = greedy_continuation(reference, completion.prompt_token_ids, NUM_TOKENS)
        assert completion.token_ids == expected
        assert completion.text == tokenizer.decode(expected, skip_special_tokens=True)
