"""The registry class; its instances hold attention backends, quantisation and speculation methods, model families.

Entries are added by plain imports. Selection calls each entry's `supports`; an entry requested by name that cannot
serve is an error with its reason, never a silent fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from slipstream.core.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Name -> entry, in order of preference (the order of registration)."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._entries: dict[str, T] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Decorator: add an entry under one or more names."""

        def add(entry: T) -> T:
            for name in names:
                if name in self._entries:
                    raise ValueError(f"{self._field} {name!r} is registered twice")
                self._entries[name] = entry
            return entry

        return add

    def names(self) -> list[str]:
        return list(self._entries)

    def values(self) -> list[T]:
        return list(self._entries.values())

    def get(self, name: str) -> T:
        """The entry of that name. Raises ConfigError listing the known names."""
        if name not in self._entries:
            raise ConfigError(self._field, name, f"accepted: {', '.join(sorted(self._entries)) or 'none registered'}")
        return self._entries[name]

    def select(self, supports: Callable[[T], str | None], asked: str | None = None) -> tuple[str, T]:
        """The entry named `asked`, or the first supported one. supports: returns a reason against an entry, or None.

        Raises ConfigError with the reason against `asked`, or the reasons against all entries.
        """
        if asked is not None:
            entry = self.get(asked)
            reason = supports(entry)
            if reason is not None:
                raise ConfigError(self._field, asked, f"cannot serve here: {reason}")
            return asked, entry
        reasons = []
        for name, entry in self._entries.items():
            reason = supports(entry)
            if reason is None:
                return name, entry
            reasons.append(f"{name}: {reason}")
        raise ConfigError(self._field, None, "none can serve here: " + "; ".join(reasons))
