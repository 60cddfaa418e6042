"""Writes safetensors files that every user may read who may read other files of their folder."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """metadata: by default what transformers asks for.

    The file gets the permissions of any new file there. save_file makes one that its owner alone may read, which a
    server that runs as another user cannot load.
    """
    from safetensors.torch import save_file

    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path, metadata=dict(metadata or {"format": "pt"}))
    path.chmod(mode)
