"""A Hugging Face cache with one repository in it, for processes that are told to stay offline."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_hub_cache(home: Path, hub_id: str, checkpoint: Path) -> dict[str, str]:
    """Lay `checkpoint` (a folder) out as the snapshot of `hub_id`.  Returns the environment that finds it."""
    repository = home / "hub" / f"models--{hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    shutil.copytree(checkpoint, repository / "snapshots" / COMMIT)
    overridden = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE")
    environment = {name: value for name, value in os.environ.items() if name not in overridden}
    return {**environment, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
