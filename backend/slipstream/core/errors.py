"""The four errors of Slipstream, by who can correct them. Standard library only.

Each maps to one Triton error code at the border (protocol/contract.py): RequestError -> INVALID_ARG, CapacityError ->
UNAVAILABLE, EngineError -> INTERNAL (RankLostError -> UNAVAILABLE); a ConfigError makes the load fail with its text.
"""

from __future__ import annotations

import logging
import secrets
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

_FIELD_CHARS = 80


class SlipstreamError(Exception):
    """Base of all errors that a user may see; str() is the sentence shown to them."""


class ConfigError(SlipstreamError):
    """Wrong configuration: the load fails. Names the field, the value and what would be accepted."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        self.field, self.value, self.accepted = field, value, accepted
        super().__init__(f"{field}={value!r}: {accepted}")


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Say in a ConfigError of a checkpoint which parameter, `field`, named it: in place of `model`, and before the
    name of one of its files, as of the model's own there is one, too."""
    try:
        yield
    except ConfigError as error:
        is_of_file = error.field.partition(" ")[0].endswith(".json")
        if error.field != "model" and not is_of_file:
            raise
        named = f"{field}'s {error.field}" if is_of_file else field
        raise ConfigError(named, error.value, error.accepted) from error.__cause__


class RequestError(SlipstreamError):
    """Invalid request (INVALID_ARG). Names the field, the value and what would be accepted."""

    def __init__(self, field: str, message: str) -> None:
        """field: cut to 80 characters, as a client may have named it."""
        self.field = field if len(field) <= _FIELD_CHARS else f"{field[: _FIELD_CHARS - 3]}..."
        super().__init__(f"{self.field}: {message}")


class CapacityError(SlipstreamError):
    """The server is full or draining (UNAVAILABLE); the same request may succeed later."""


class EngineError(SlipstreamError):
    """A bug of the engine: every in-flight request is answered with it, and readiness turns false."""


class RankLostError(EngineError):
    """A process that shares the model is lost (UNAVAILABLE): the engine starts again, and the request may succeed."""


def internal_error(logger: logging.Logger, what: str, error: BaseException) -> EngineError:
    """Log an unexpected exception with its traceback; the returned error shows clients only its number.

    The exception's text may contain paths, code or values of other clients.
    """
    number = secrets.token_hex(4)
    logger.error("internal error %s: %s", number, what, exc_info=error)
    return EngineError(f"internal error {number}: the server's log has the reason under this number")


def drop_locals(failure: BaseException) -> None:
    """Let the frames of a failure forget what had been made until then; those that still run do not."""
    known: list[BaseException] = []
    error: BaseException | None = failure
    while error is not None and error not in known:
        known.append(error)
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
