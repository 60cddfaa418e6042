"""The log of the processes that the backend starts: lines on stderr, which it forwards to Triton's log."""

from __future__ import annotations

import logging
import os
import sys


class LevelPrefixFormatter(logging.Formatter):
    """Begin every line with the letter of its level, by which the backend forwards it to Triton's log."""

    def format(self, record: logging.LogRecord) -> str:
        letter = "D" if record.levelno < logging.INFO else record.levelname[0].replace("C", "E")
        return "\n".join(f"{letter} {line}" for line in super().format(record).splitlines())


def configure_logging() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LevelPrefixFormatter("%(message)s"))
    logging.basicConfig(level=os.environ.get("SLIPSTREAM_LOG_LEVEL", "INFO").upper(), handlers=[handler], force=True)
