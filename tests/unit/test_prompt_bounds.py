"""How long a prompt may be is known before it is tokenised, or after as much work as max_model_len tokens are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import toy_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.config import EngineConfig, ModelConfig
from slipstream.core.errors import RequestError
from slipstream.protocol.client_settings import Settings
from slipstream.protocol.prompts import _encode_end, encode_prompt, encode_reference, read_prompt
from slipstream.tokenizer.tokenizer import TextTokenizer
from tokenizers import Tokenizer

DEMO = TextTokenizer.load(Path(__file__).resolve().parents[2] / "models" / "slipstream-demo-code")
CODE = Path(json.__file__).read_text("utf-8") * 4


class Counting(TextTokenizer):
    """Counts the characters that are encoded, and the most tokens that are made at once."""

    num_chars = most_tokens = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.num_chars += len(text)
        self.most_tokens = max(self.most_tokens, len(super().encode(text, add_special_tokens)))
        return super().encode(text, add_special_tokens)


@pytest.fixture
def demo() -> Counting:
    return Counting(DEMO.backend)


def test_the_longest_token_is_measured_by_what_it_stands_for() -> None:
    """The demo model's is 28 spaces, spelled with 56 bytes."""
    assert DEMO.max_token_bytes == 28
    assert len(DEMO.encode(" " * 28, False)) == 1
    assert len(encode_prompt("text_input", " " * (28 * 99), DEMO, False, 99)) > 99, "the engine counts tokens"
    with pytest.raises(RequestError, match=r"^text_input: the prompt has 2773 bytes, accepted: at most 2772 "):
        encode_prompt("text_input", " " * (28 * 99 + 1), DEMO, False, 99)


def test_a_text_of_too_many_tokens_is_refused_after_its_beginning(demo: Counting) -> None:
    text = CODE[: 28 * 512]
    with pytest.raises(RequestError, match=r"^text_input: the prompt has more than 512 tokens in the first \d+ of its"):
        encode_prompt("text_input", text, demo, True, 512)
    assert demo.num_chars <= 8 * 512


@pytest.mark.parametrize(
    "unit", ['"\n', "中", "a\n\n'", "a b " * 3 + "中" * 9000], ids=["lines", "han", "quotes", "mixed"]
)
def test_no_more_tokens_are_made_at_once_than_a_few_times_as_many_as_fit(demo: Counting, unit: str) -> None:
    """Texts without a place where they can be cut: each token takes 380 bytes, 10 MB of text took 3.7 GB."""
    num_tokens = 32_768
    text = unit * (28 * num_tokens // len(unit.encode()))
    with pytest.raises(
        RequestError, match=r"^text_input: the prompt has more than 32768 tokens in the first \d+ of its"
    ):
        encode_prompt("text_input", text, demo, True, num_tokens)
    assert demo.most_tokens <= 2 * num_tokens and demo.num_chars < len(text) // 2
    settings = Settings()
    settings |= {"prompt": text, "truncate_prompt_tokens": num_tokens, "add_special_tokens": False}
    config = EngineConfig(model=ModelConfig("m", max_model_len=num_tokens + 1))
    kept, _ = read_prompt(settings, config, demo, 16)
    assert kept == DEMO.encode(text[-num_tokens - 99 :], False)[-num_tokens:] and demo.most_tokens <= 4 * num_tokens
    reference = encode_reference(text, demo, num_tokens)
    assert reference[:1000] == DEMO.encode(text[:4096], False)[:1000] and len(reference) == num_tokens


def test_the_end_of_a_text_is_looked_for_as_far_as_it_may_be(demo: Counting) -> None:
    """White space has the fewest tokens: what is kept may be all of it."""
    for text in (" " * 28 * 9000, CODE[:8000] + " " * 28 * 9000, "x", " " * 28 * 400 + CODE[:20_000]):
        token_ids = _encode_end(text, demo, False, 2000)
        assert token_ids == DEMO.encode(text[-16 * 2000 :], False)[-2000:]


@pytest.mark.parametrize("num_tokens", [64, 256, 1024, 16_384])
def test_a_text_that_fits_is_never_refused(demo: Counting, num_tokens: int) -> None:
    """The longest tokens, in the largest allowed number: white space, and white space after some code."""
    spaces = " " * 16 * num_tokens
    start = CODE[: num_tokens // 2]
    code = start + spaces[: 16 * (num_tokens - len(DEMO.encode(start)) - 2)]
    words = " ".join(["a"] + ["return"] * (num_tokens - 2))
    for text in (spaces, code, words):
        assert num_tokens - 8 < len(encode_prompt("p", text, demo, False, num_tokens)) <= num_tokens
    assert demo.num_chars <= 3 * (len(spaces) + len(code) + len(words))


chars = st.sampled_from("ab1 \n\t.'(é中\u0301")


@settings(max_examples=400, deadline=None)
@given(before=st.text(chars, max_size=12), letter=st.sampled_from("az09Z"), after=st.text(chars, max_size=12))
def test_a_cut_text_begins_with_the_tokens_of_the_whole(before: str, letter: str, after: str) -> None:
    assert DEMO.can_cut
    first = DEMO.encode(before + letter, False)
    assert DEMO.encode(before + letter + " " + after, False)[: len(first)] == first


def test_tokenizers_that_span_a_cut_are_not_cut() -> None:
    """One has an added token with a space in it, one was trained across words, one has no table."""
    for make in (toy_tokenizers.byte_level, toy_tokenizers.sentencepiece, toy_tokenizers.metaspace):
        tokenizer = TextTokenizer(make())
        assert not tokenizer.can_cut
        assert tokenizer.surely_exceeds("a b " * 4000, 4) == 0
        assert 0 < tokenizer.surely_exceeds("a b " * 40_000, 4) < 40_000, "of far more tokens than fit"


def test_a_tokenizer_whose_words_look_ahead_is_not_cut() -> None:
    """Its pattern takes a letter for itself when two words follow: the vocabulary alone does not show that."""
    state = json.loads(DEMO.backend.to_str())
    looks_ahead = {"Regex": r"\p{L}(?=\p{L} \p{L})|[^\s]+| "}
    state["pre_tokenizer"]["pretokenizers"][0]["pattern"] = looks_ahead
    assert not TextTokenizer(Tokenizer.from_str(json.dumps(state))).can_cut


def test_encoding_in_batches_is_encoding() -> None:
    texts = ["", "a", CODE[:500], "  x\n", "<|endoftext|>", "中é"]
    assert DEMO.encode_all(texts) == [DEMO.backend.encode(text, add_special_tokens=False).ids for text in texts]
    assert [DEMO.encode(text) for text in texts] == [DEMO.backend.encode(text).ids for text in texts]
    assert DEMO.decode([5, 0, 9]) == DEMO.backend.decode([5, 0, 9])
