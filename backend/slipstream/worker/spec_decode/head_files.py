"""Where a head that drafts is read from, for those that load it and for the memory plan alike. Any thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from slipstream.core.config import EngineConfig
from slipstream.core.draft_methods import DRAFT_METHODS
from slipstream.core.errors import ConfigError
from slipstream.nn.checkpoint_path import resolve_checkpoint, resolve_head

T = TypeVar("T")


def read_head(config: EngineConfig, method: str, read: Callable[[Path | None], T]) -> T:
    """What `read` makes of the folder that the method's parameter names, or of None: a head of dummy weights.

    Without one, the method may be in the model's own checkpoint. Raises ConfigError where there is no head.
    """
    described = DRAFT_METHODS[method]
    folder: str = getattr(config.speculation, described.parameter)
    if folder:
        return read(resolve_head(described.parameter, folder))
    if config.model.load_format == "dummy":
        return read(None)
    if not described.is_in_model:
        raise described.missing()
    try:
        return read(resolve_checkpoint(config.model.model))
    except ConfigError:
        raise described.missing() from None
