"""A text as a reader, or an LLM, takes it: without the disguises of letters that an encoder would not know.

An encoder reads a full-width, mathematical or look-alike letter as an unknown token, and unknown tokens are harmless.
Pure functions. Sources: Unicode Standard Annex 15 (NFKC, and section 13: marks in a row), Technical Standard 39
(confusables, a part of them).
"""

from __future__ import annotations

import re
import unicodedata

_BLANKS = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"  # letters and marks that show nothing, beside category Cf
_LOOK_ALIKES = str.maketrans(
    "аеорсухіјѕһԁԛԝνοαιρκτυАВЕКМНОРСТУХІЈЅΑΒΕΖΗΙΚΜΝΟΡΤΥΧ",
    "aeopcyxijshdqwvoaipktuABEKMHOPCTYXIJSABEZHIKMNOPTYX",
)
_MAX_MARKS = 30  # in a row, as in Unicode's Stream-Safe Text Format
_LATIN = re.compile(r"[A-Za-z]")
_WORD = re.compile(r"\w+")
_SPACED = re.compile(r"(?<!\w)(?:\w[ .\-_*]){3,}\w(?!\w)")  # at least four letters, one by one


def _marks() -> str:
    """All characters that are sorted among others behind a letter, or stand for such ones: accents, vowel signs."""
    letters = map(chr, range(0x300, 0x1F000))
    return "".join(c for c in letters if unicodedata.combining(unicodedata.normalize("NFKD", c)[0]))


_LONG_MARKS = re.compile(f"([{_marks()}]{{{_MAX_MARKS}}})[{_marks()}]+")


def as_read(text: str) -> str:
    """In NFKC, without characters that show nothing, and with Latin letters in place of look-alikes among them."""
    if text.isascii():
        return text
    # Python sorts the marks of a letter by insertion: 200,000 of them would take 40 s
    plain = unicodedata.normalize("NFKC", _LONG_MARKS.sub(r"\1", text))
    plain = "".join(c for c in plain if unicodedata.category(c) != "Cf" and c not in _BLANKS)
    return _WORD.sub(lambda word: _unmixed(word[0]), plain)


def joined_letters(text: str) -> str:
    """With letters that are written one by one, as in `k i l l`, as words."""
    return _SPACED.sub(lambda found: re.sub(r"[ .\-_*]", "", found[0]), text)


def _unmixed(word: str) -> str:
    """A word of Latin letters and look-alikes in Latin; one of another script alone stays."""
    return word.translate(_LOOK_ALIKES) if _LATIN.search(word) else word
