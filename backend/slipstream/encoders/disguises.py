"""A text as a reader, or an LLM, takes it: without the disguises of letters that an encoder would not know.

An encoder reads a full-width, mathematical or look-alike letter as an unknown token, and unknown tokens are harmless.
Pure functions. Sources: Unicode Standard Annex 15 (NFKC, and section 13: marks in a row), Technical Standard 39
(confusables, a part of them).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

_BLANKS = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"  # letters and marks that show nothing, beside category Cf
_LOOK_ALIKES = str.maketrans(
    "аеорсухіјѕһԁԛԝνοαιρκτυАВЕКМНОРСТУХІЈЅΑΒΕΖΗΙΚΜΝΟΡΤΥΧ",
    "aeopcyxijshdqwvoaipktuABEKMHOPCTYXIJSABEZHIKMNOPTYX",
)
_MAX_MARKS = 30  # in a row, as in Unicode's Stream-Safe Text Format
_LONGEST_LETTER = 3  # characters in NFKC, such as a letter in parentheses
_LATIN = re.compile(r"[A-Za-z]")
_WORD = re.compile(r"\w+")
_SPACED = re.compile(r"(?<!\w)(?:\w[ .\-_*]){3,}\w(?!\w)")  # at least four letters, one by one


def _letters() -> Iterator[str]:
    """All characters of which some may have another form."""
    return map(chr, range(0x300, 0x1F000))


def _marks() -> str:
    """All characters that are sorted among others behind a letter, or stand for such ones: accents, vowel signs."""
    return "".join(c for c in _letters() if unicodedata.combining(unicodedata.normalize("NFKD", c)[0]))


def _words() -> str:
    """All characters that stand for a word, a phrase or a number, up to 18 characters: no letter in disguise."""
    return "".join(c for c in _letters() if len(unicodedata.normalize("NFKC", c)) > _LONGEST_LETTER)


_LONG_MARKS = re.compile(f"([{_marks()}]{{{_MAX_MARKS}}})[{_marks()}]+")
_WORDS = re.compile(f"([{_words()}])")


def as_read(text: str) -> str:
    """In NFKC, without characters that show nothing, and with Latin letters in place of look-alikes among them.

    Has at most _LONGEST_LETTER times the characters, so that a bound on texts bounds what an encoder reads.
    """
    if text.isascii():
        return text
    # Python sorts the marks of a letter by insertion: 200,000 of them would take 40 s
    between = _WORDS.split(_LONG_MARKS.sub(r"\1", text))  # every second part is such a word
    plain = "".join(part if index % 2 else unicodedata.normalize("NFKC", part) for index, part in enumerate(between))
    plain = "".join(c for c in plain if unicodedata.category(c) != "Cf" and c not in _BLANKS)
    return _WORD.sub(lambda word: _unmixed(word[0]), plain)


def joined_letters(text: str) -> str:
    """With letters that are written one by one, as in `k i l l`, as words."""
    return _SPACED.sub(lambda found: re.sub(r"[ .\-_*]", "", found[0]), text)


def _unmixed(word: str) -> str:
    """A word of Latin letters and look-alikes in Latin; one of another script alone stays."""
    return word.translate(_LOOK_ALIKES) if _LATIN.search(word) else word
