"""How an engine process ends whose load cannot succeed: the backend is told why.

Any thread: the one that loads may wait for ever for a device that waits for a lost rank.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn

from slipstream.core.errors import SlipstreamError
from slipstream.engine.socket import EngineLink
from slipstream.protocol import wire

logger = logging.getLogger("slipstream")


def tell_load_failure(link: EngineLink, model_name: str, error: Exception) -> None:
    """Log it and send LOAD_FAILED; of other errors with the traceback. Raises OSError if the backend is gone."""
    is_ours = isinstance(error, SlipstreamError | OSError)
    logger.error("model %s cannot be loaded: %s", model_name, error, exc_info=None if is_ours else error)
    link.send(wire.encode_load_failed(str(error) if is_ours else f"{type(error).__name__}: {error}"))


def end_load(link: EngineLink, model_name: str, error: Exception) -> NoReturn:
    """Tell it and end the process, whatever its other threads wait for."""
    with suppress(OSError):
        tell_load_failure(link, model_name, error)
    end_process(1)


def end_process(status: int) -> NoReturn:
    """Not through the interpreter's teardown: threads of torch may be inside a step."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)
