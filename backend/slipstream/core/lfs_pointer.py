"""Recognises what `git clone` leaves of a large file where Git LFS is not installed."""

from __future__ import annotations

from pathlib import Path

_FIRST_WORDS = b"version https://git-lfs"


def lfs_advice(file: Path) -> str:
    """What to do with a file that is a pointer of Git LFS, to stand behind an error; empty for any other file."""
    try:
        with file.open("rb") as opened:
            is_pointer = opened.read(len(_FIRST_WORDS)) == _FIRST_WORDS
    except OSError:
        return ""
    return "; it is a pointer of Git LFS: run `git lfs pull` in its folder" if is_pointer else ""
