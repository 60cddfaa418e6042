"""Small tokenizers of the two families that matter, trained in a moment on a few sentences of many scripts."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog. def add(a, b):\n    return a + b\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. L'été, ça va très bien à l'île d'Oléron.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "你好，世界！今天天气很好。いろはにほへと ちりぬるを。다람쥐 헌 쳇바퀴에 타고파.",
    "सभी मनुष्यों को गौरव और अधिकारों में समानता प्राप्त है। כל בני האדם נולדו בני חורין. يولد جميع الناس أحرارا",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 e\u0301 n\u0303 a\u0308 \u0e01\u0e33 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
] * 4
SPECIAL = ["<s>", "</s>", "<|user|>"]


@lru_cache
def byte_level() -> Tokenizer:
    """Like GPT-2, Llama 3 and Qwen: byte-level BPE, any byte sequence can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False), AddedToken("→", normalized=False)])
    return tokenizer


@lru_cache
def sentencepiece() -> Tokenizer:
    """Like Llama 2 and Mistral: words marked by U+2581, byte tokens for what the vocabulary lacks, <s> in front."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token=None, fuse_unk=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    # Given whole: the trainer would choose among characters that are equally frequent by the order of a hash table.
    counts = Counter("".join(TEXTS).replace(" ", "▁"))
    alphabet = sorted(counts, key=lambda character: (-counts[character], character))[:90]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[*SPECIAL, *bytes_], initial_alphabet=alphabet, limit_alphabet=len(alphabet),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer = _without_special(tokenizer, bytes_)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def _without_special(tokenizer: Tokenizer, tokens: list[str]) -> Tokenizer:
    """Byte tokens are ordinary vocabulary, not special: train them in as special, then take the mark away."""
    import json

    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in set(tokens)]
    return Tokenizer.from_str(json.dumps(state))


@lru_cache
def metaspace() -> Tokenizer:
    """A decoder that has no table (Metaspace alone): decoded by windows."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer
