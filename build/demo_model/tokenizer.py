"""Train the demo model's tokenizer: byte-level BPE whose pre-tokens follow the shape of Python source.

Needs the tokenizers library. Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0

# A line break, the indent after it, and the word that follows are three pre-tokens: with the indent glued to the break
# (one token fewer per line), a prompt that ends in a line break could only be continued at column 0, and was.
# A word takes the space, dot or underscore before it; numbers come in threes; other runs of spaces leave their last
# one to what follows.
PRE_TOKEN = (
    r"\n"
    r"|(?<=\n)[^\S\n]+"
    r"|[ ._]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|[^\S\n]+(?!\S)"
    r"|[^\S\n]+"
)

# A completion model's idea of a chat: every turn that is not the assistant's becomes a comment above the code.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + '\\n\\n' }}"
    "{% else %}{{ '# ' + message['role'] | capitalize + ': ' + message['content'] | replace('\\n', '\\n# ') + '\\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n' }}{% endif %}"
)


def corpus_texts(path: Path) -> Iterator[str]:
    """The text of each file of a JSON-lines corpus."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def sample_texts(path: Path, max_bytes: int, seed: int = 0) -> list[str]:
    """A uniform sample of whole files, about max_bytes in all."""
    keep = min(1.0, max_bytes / path.stat().st_size)
    chance = random.Random(seed)
    return [text for text in corpus_texts(path) if chance.random() < keep]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over all 256 bytes, so that any text survives encode and decode unchanged."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PRE_TOKEN), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=32,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    tokenizer.post_processor = begin_of_file()
    return tokenizer


def begin_of_file() -> processors.TemplateProcessing:
    """Put <|endoftext|> before a prompt, as before every file of the corpus.

    Without it a prompt reads like the middle of some file, its first line at an unknown indent: "try:" at column 0 was
    then continued as if it stood inside a method.
    """
    return processors.TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, END_OF_TEXT_ID)])


def save(tokenizer: Tokenizer, out_dir: Path, max_tokens: int) -> None:
    """Write the three tokenizer files of a Hugging Face checkpoint."""
    out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out_dir / "tokenizer.json"))
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        **special,
    }
    (out_dir / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out_dir / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")


def load(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))
