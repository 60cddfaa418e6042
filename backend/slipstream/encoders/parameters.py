"""The parameters of a config.pbtxt, read with an error that names the parameter and what is accepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from slipstream.core.errors import ConfigError
from slipstream.core.numerals import read_decimal, read_whole

# Triton's own keys for the Python backend, which it adds to the model's parameters
_OF_TRITON = {"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", "TRITON_BATCH_STRATEGY_PATH"}

N = TypeVar("N", int, float)


class Parameters:
    """Read each known parameter, then call `refuse_others`: unread parameters are misspelt."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {name: value.strip() for name, value in given.items()}
        self._known: set[str] = set()

    @classmethod
    def of_model(cls, config: Mapping[str, object]) -> Parameters:
        """config: the model configuration as Triton gives it, from JSON."""
        given = config.get("parameters")
        entries = given if isinstance(given, dict) else {}
        return cls({name: str(entry["string_value"]) for name, entry in entries.items()})

    def text(self, name: str, default: str) -> str:
        self._known.add(name)
        value = self._given.get(name, default)
        if "${" in value:
            raise ConfigError(name, value, "a placeholder that was not filled in")
        return value

    def names(self, name: str) -> tuple[str, ...]:
        """A list, separated by commas; by default empty."""
        return tuple(dict.fromkeys(one.strip() for one in self.text(name, "").split(",") if one.strip()))

    def choice(self, name: str, default: str, accepted: tuple[str, ...]) -> str:
        value = self.text(name, default)
        if value not in accepted:
            raise ConfigError(name, value, f"accepted: {', '.join(accepted)}")
        return value

    def integer(self, name: str, default: int, lowest: int, highest: int) -> int:
        accepted = f"a whole number from {lowest} to {highest}"
        return self._between(name, str(default), read_whole, (lowest, highest), accepted)

    def number(self, name: str, default: float, lowest: float, highest: float) -> float:
        accepted = f"a number from {lowest:g} to {highest:g}"
        return self._between(name, str(default), read_decimal, (lowest, highest), accepted)

    def _between(self, name: str, default: str, read: Callable[[str], N], bounds: tuple[N, N], accepted: str) -> N:
        value = self.text(name, default)
        try:
            number = read(value)
        except ValueError:
            raise ConfigError(name, value, f"accepted: {accepted}") from None
        if not bounds[0] <= number <= bounds[1]:
            raise ConfigError(name, value, f"accepted: {accepted}")
        return number

    def refuse_others(self) -> None:
        others = sorted(set(self._given) - self._known - _OF_TRITON)
        if others:
            raise ConfigError(others[0], self._given[others[0]], f"unknown; accepted: {', '.join(sorted(self._known))}")
