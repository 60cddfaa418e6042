"""Incremental detokenising against whole decoding: any script, any cut, any bytes, at any border of the prompt."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import pytest
import toy_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.tokenizer.detokenizer import context_token_ids, decode_after, start_detokenizer
from slipstream.tokenizer.token_table import build_token_table
from slipstream.tokenizer.tokenizer import TextTokenizer
from tokenizers import Tokenizer, models

REPLACEMENT = "\ufffd"
BYTE_LEVEL = TextTokenizer(toy_tokenizers.byte_level())
SENTENCEPIECE = TextTokenizer(toy_tokenizers.sentencepiece())
METASPACE = TextTokenizer(toy_tokenizers.metaspace())


class WithoutTable:
    """The same tokenizer, decoded by windows."""

    token_table = None

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.character_endings = tokenizer.character_endings
        self.decode = tokenizer.decode


TOKENIZERS = {
    "byte_level": BYTE_LEVEL,
    "sentencepiece": SENTENCEPIECE,
    "metaspace": METASPACE,
    "byte_level_by_windows": WithoutTable(BYTE_LEVEL),
    "sentencepiece_by_windows": WithoutTable(SENTENCEPIECE),
}
ENCODERS = {"metaspace": METASPACE, "sentencepiece": SENTENCEPIECE, "sentencepiece_by_windows": SENTENCEPIECE}

EMOJI = ["👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪", "e\u0301", "\u0e01\u0e33", "𝔘", "क्षि", "ﷺ", "ྰ", "\u200d", " ", "\n", "  "]
texts = st.lists(st.one_of(st.sampled_from(EMOJI + toy_tokenizers.TEXTS[:6]), st.text(max_size=6)), max_size=5).map(
    "".join
)


def cut(token_ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Bursts of these sizes, over and over."""
    bursts, at, turn = [], 0, 0
    while at < len(token_ids):
        size = sizes[turn % len(sizes)]
        bursts.append(token_ids[at : at + size])
        at, turn = at + size, turn + 1
    return bursts


def stream(tokenizer, prompt: list[int], output: list[int], sizes: list[int], skip: bool = True) -> list[str]:
    detokenizer = start_detokenizer(tokenizer, prompt, skip)
    return [detokenizer.push(burst) for burst in cut(output, sizes)] + [detokenizer.flush()]


def whole(tokenizer, prompt: list[int], output: list[int], skip: bool = True) -> str:
    """The decode of everything, less the whole characters of the prompt."""
    return tokenizer.decode(prompt + output, skip)[len(tokenizer.decode(prompt, skip).rstrip(REPLACEMENT)) :]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=120, deadline=None)
@given(prompt=texts, output=texts, sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_deltas_are_the_whole_decode(name: str, prompt: str, output: str, sizes: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    encoder = ENCODERS.get(name, BYTE_LEVEL)
    prompt_ids, output_ids = encoder.encode(prompt), encoder.encode(output, False)
    expected = whole(tokenizer, prompt_ids, output_ids)
    deltas = stream(tokenizer, prompt_ids, output_ids, sizes)
    if REPLACEMENT in tokenizer.decode(prompt_ids):
        return  # where the prompt itself holds U+FFFD, `whole` above cannot tell its end; the next test covers it
    assert "".join(deltas) == expected
    if REPLACEMENT not in expected:
        assert not any(REPLACEMENT in delta for delta in deltas)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=30),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    skip=st.booleans(),
)
def test_any_token_ids_byte_level(ids: list[int], sizes: list[int], skip: bool) -> None:
    """Also invalid UTF-8, special tokens, added tokens and ids outside the vocabulary; exactly, from nothing."""
    deltas = stream(BYTE_LEVEL, [], ids, sizes, skip)
    assert "".join(deltas) == BYTE_LEVEL.decode(ids, skip)


def byte_pieces(ids: list[int], prompt_len: int, skip: bool) -> tuple[bytes, bytes]:
    """The bytes of prompt and output by an independent reading of the vocabulary."""
    alphabet = {char: byte for byte, char in _gpt2_bytes().items()}
    parts = []
    for token_id in ids:
        token = BYTE_LEVEL.backend.id_to_token(token_id)
        if token is None or (skip and token_id in BYTE_LEVEL.special_ids):
            parts.append(b"")
        elif all(char in alphabet for char in token):
            parts.append(bytes(alphabet[char] for char in token))
        else:
            parts.append(token.encode())
    return b"".join(parts[:prompt_len]), b"".join(parts[prompt_len:])


def _gpt2_bytes() -> dict[int, str]:
    shown = [b for b in range(256) if chr(b).isprintable() and b not in (0x20, 0xA0, 0xAD) and b > 0x20]
    hidden = [b for b in range(256) if b not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), min_size=1, max_size=24), data=st.data())
def test_an_incomplete_prompt_is_completed(ids: list[int], data: st.DataObject) -> None:
    """A character that the prompt begins and the output completes comes out whole, wherever the border is."""
    border = data.draw(st.integers(0, len(ids)))
    before, after = byte_pieces(ids, border, True)
    certain = len(before)
    for size in range(1, min(3, len(before)) + 1):  # the longest end of the prompt that may still become a character
        tail = before[-size:]
        if tail[0] >= 0xC0 and tail.decode("utf-8", "replace") == REPLACEMENT and _is_open(tail):
            certain = len(before) - size
    expected = (before[certain:] + after).decode("utf-8", "replace")
    assert "".join(stream(BYTE_LEVEL, ids[:border], ids[border:], [1])) == expected


def _is_open(tail: bytes) -> bool:
    import codecs

    return codecs.getincrementaldecoder("utf-8")("replace").decode(tail) == ""


def reference_byte_fallback(ids: list[int]) -> str:
    """The documented rule, written down naively: a run of byte tokens gives its characters until its first fault; every
    byte from the fault on (and an incomplete end) is one U+FFFD."""
    out, run = "", b""
    for token_id in [*ids, None]:
        token = SENTENCEPIECE.backend.id_to_token(token_id) if token_id is not None else ""
        if token is None or (token_id is not None and token_id in SENTENCEPIECE.special_ids):
            continue
        if token.startswith("<0x") and len(token) == 6:
            run += bytes([int(token[3:5], 16)])
            continue
        try:
            out += run.decode()
        except UnicodeDecodeError as error:
            out += run[: error.start].decode() + REPLACEMENT * (len(run) - error.start)
        run = b""
        out += token.replace("▁", " ")
    return out[1:] if out.startswith(" ") else out


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, SENTENCEPIECE.vocab_size + 3), max_size=30),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_any_token_ids_byte_fallback(ids: list[int], sizes: list[int]) -> None:
    text = "".join(stream(SENTENCEPIECE, [], ids, sizes))
    assert text == reference_byte_fallback(ids)
    if REPLACEMENT not in SENTENCEPIECE.decode(ids):
        assert text == SENTENCEPIECE.decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "byte_level_by_windows"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_stateless_pieces_equal_the_stream(name: str, data: st.DataObject) -> None:
    """Each delta comes out of its own tokens and a short context alone, as `postprocessing` does it."""
    tokenizer = TOKENIZERS[name]
    vocab_size = ENCODERS.get(name, BYTE_LEVEL).vocab_size
    ids = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=24))
    border = data.draw(st.integers(0, len(ids)))
    detokenizer = start_detokenizer(tokenizer, ids[:border])
    for at in range(border, len(ids)):
        context = context_token_ids(tokenizer, ids[:at])
        assert decode_after(tokenizer, context, [ids[at]]) == detokenizer.push([ids[at]])
    context = context_token_ids(tokenizer, ids[:border])
    in_full = "".join(stream(tokenizer, ids[:border], ids[border:], [1]))
    assert decode_after(tokenizer, context, ids[border:], num_characters=len(in_full)) == in_full


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_space_is_never_lost_at_the_border(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    encoder = ENCODERS.get(name, BYTE_LEVEL)
    prompt, output = encoder.encode("The quick"), encoder.encode("brown fox jumps", False)
    expected = "brown fox jumps" if encoder is BYTE_LEVEL else " brown fox jumps"
    assert "".join(stream(tokenizer, prompt, output, [1])) == expected
    special_only = [encoder.backend.token_to_id("<s>")]
    text = "".join(stream(tokenizer, special_only, output, [1]))
    assert text == tokenizer.decode(special_only + output)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_half_a_character_waits_and_then_shows(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("ཀ", False)[-3:]  # not in the training text: three single bytes
    detokenizer = start_detokenizer(tokenizer, tokenizer.encode("x"))
    assert [detokenizer.push([token_id]) for token_id in ids[:2]] == ["", ""]
    assert detokenizer.is_pending
    assert detokenizer.push([ids[2]]) == "ཀ"
    assert not detokenizer.is_pending
    assert detokenizer.push(ids[:2]) == ""
    assert detokenizer.flush().strip(REPLACEMENT) == ""
    assert not detokenizer.is_pending


def test_special_tokens_show_only_when_asked() -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE, METASPACE):
        prompt = tokenizer.encode("The quick")
        ids = [tokenizer.backend.token_to_id("</s>"), tokenizer.backend.token_to_id("<|user|>")]
        assert "".join(stream(tokenizer, prompt, ids, [1], skip=True)) == ""
        assert "".join(stream(tokenizer, prompt, ids, [1], skip=False)) == "</s><|user|>"


def test_a_decoder_of_unknown_shape_has_no_table() -> None:
    assert METASPACE.token_table is None
    assert build_token_table({"a": 0}, None, ()) is None
    assert build_token_table({"a": 0}, {"type": "WordPiece", "prefix": "##", "cleanup": True}, ()) is None
    assert BYTE_LEVEL.token_table is not None and SENTENCEPIECE.token_table is not None


def test_long_random_streams_agree_with_the_library() -> None:
    """Long runs of one script at a time, as a model writes them: no drift over thousands of tokens."""
    rng = random.Random(7)
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        text = "".join(rng.choice([*toy_tokenizers.TEXTS, *EMOJI]) for _ in range(60))
        prompt, output = tokenizer.encode("Text: "), tokenizer.encode(text, False)
        deltas = stream(tokenizer, prompt, output, [1, 1, 3])
        assert "".join(deltas) == whole(tokenizer, prompt, output)
        assert not any(REPLACEMENT in delta for delta in deltas)


def test_many_long_tokens_take_no_square_of_their_number() -> None:
    """postprocessing decodes an answer of all tokens at once, and those of other requests behind it."""
    table = build_token_table({"\u0120" * 128: 0}, {"type": "ByteLevel"}, ())
    start = time.process_time()
    text = decode_after(SimpleNamespace(token_table=table), [], [0] * 131_072)
    assert time.process_time() - start < 2, "20 s and more, where the text is copied with each token"
    assert text == " " * 128 * 131_072


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_tokens_without_text_are_no_context(name: str, data: st.DataObject) -> None:
    """They go with each response of a stream, and a prompt may be full of them."""
    tokenizer = TOKENIZERS[name]
    some = st.one_of(st.sampled_from(sorted(tokenizer.special_ids)), st.integers(0, tokenizer.vocab_size + 2))
    prompt = [*data.draw(st.lists(some, max_size=8)), *[min(tokenizer.special_ids)] * 50_000]
    output = data.draw(st.lists(some, min_size=1, max_size=6))
    context = context_token_ids(tokenizer, prompt)
    assert len(context) <= 8
    assert decode_after(tokenizer, context, output) == decode_after(tokenizer, prompt, output)


PARTS = [BYTE_LEVEL.token_table.pieces.index(bytes([byte])) for byte in "€😀".encode()]


@settings(max_examples=400, deadline=None)
@given(
    ids=st.lists(st.one_of(st.integers(0, BYTE_LEVEL.vocab_size + 3), st.sampled_from(PARTS)), max_size=30),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    data=st.data(),
)
def test_windows_give_what_the_table_gives(ids: list[int], sizes: list[int], data: st.DataObject) -> None:
    """Also behind a prompt that ends in U+FFFD, in bytes that are no character, or in a part of a character."""
    border = data.draw(st.integers(0, len(ids)))
    expected = stream(BYTE_LEVEL, ids[:border], ids[border:], sizes)
    assert "".join(stream(WithoutTable(BYTE_LEVEL), ids[:border], ids[border:], sizes)) == "".join(expected)


@settings(max_examples=200, deadline=None)
@given(text=st.text("ཀ😀鬱a ", max_size=12), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), data=st.data())
def test_windows_go_on_within_a_run_of_byte_tokens(text: str, sizes: list[int], data: st.DataObject) -> None:
    ids = SENTENCEPIECE.encode(text)
    border = data.draw(st.integers(0, len(ids)))
    expected = stream(SENTENCEPIECE, ids[:border], ids[border:], sizes)
    assert "".join(stream(WithoutTable(SENTENCEPIECE), ids[:border], ids[border:], sizes)) == "".join(expected)


@pytest.mark.parametrize("name", ["byte_level_by_windows", "sentencepiece_by_windows", "words"])
def test_a_replacement_character_of_the_prompt_is_not_repeated(name: str) -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "quick": 1, REPLACEMENT: 2}, unk_token="<unk>"))
    tokenizer = TOKENIZERS.get(name) or TextTokenizer(words)
    encoder = ENCODERS.get(name, BYTE_LEVEL) if name in TOKENIZERS else tokenizer
    prompt, output = encoder.encode("quick") + encoder.encode(REPLACEMENT, False) * 2, encoder.encode("quick", False)
    assert tokenizer.token_table is None and tokenizer.decode(prompt).endswith(REPLACEMENT)
    detokenizer = start_detokenizer(tokenizer, prompt)
    assert not detokenizer.is_pending
    assert "".join(detokenizer.push([token_id]) for token_id in output).strip() == "quick"
    assert "".join(detokenizer.push([token_id]) for token_id in prompt[1:]).strip()[-1] == REPLACEMENT
    assert detokenizer.flush() == "", "it is no part of a character"


class CountedDecodes(WithoutTable):
    """num_tokens: decoded so far."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        super().__init__(tokenizer)
        self.num_tokens = 0

        def decode(token_ids: list[int], skip_special_tokens: bool = True) -> str:
            self.num_tokens += len(token_ids)
            return tokenizer.decode(token_ids, skip_special_tokens)

        self.decode = decode


def test_windows_of_what_is_no_text_take_no_square_of_its_length() -> None:
    """No suffix of bytes that continue a character begins at a whole one; a skipped token never leaves the window."""
    continuing = BYTE_LEVEL.token_table.pieces.index(b"\x80")
    for prompt, output in (
        ([continuing] * 5_000, [continuing] * 20),
        ([7], [min(BYTE_LEVEL.special_ids)] * 5_000),
        (PARTS[:1], PARTS[:1] * 500),
    ):
        tokenizer = CountedDecodes(BYTE_LEVEL)
        text = "".join(stream(tokenizer, prompt, output, [1]))
        assert text.strip(REPLACEMENT) == ""
        assert tokenizer.num_tokens < 200_000
