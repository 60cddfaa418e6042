"""Reads a GGUF file's keys and tensors with the package `gguf`, and nothing beyond the end of the file.

Imported only when a file is converted: the package is an optional library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGUFReader

from slipstream.core.errors import ConfigError
from slipstream.nn.gguf.metadata import FIELD


class _BoundedReader(GGUFReader):
    """The package reads past the end as nothing, so that a damaged count of 2^60 numbers would be a loop as long."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if int(offset) + int(count) > len(self.data):  # every number has a byte at least
            raise ValueError(f"ends before byte {int(offset) + int(count)}, which it names")
        found = super()._get(offset, dtype, count, override_order)
        if len(found) != count:
            raise ValueError(f"ends within the {int(count)} values at byte {int(offset)}")
        return found


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(values by key, tensors by name). Raises ConfigError for a file that is no whole GGUF file."""
    try:
        reader = _BoundedReader(file)
        values = {name: field.contents() for name, field in reader.fields.items()}
        return values, {tensor.name: tensor for tensor in reader.tensors}
    except Exception as error:  # the package raises whatever damaged bytes lead to
        raise ConfigError(FIELD, str(file), f"not a GGUF file that can be read: {error}") from error
