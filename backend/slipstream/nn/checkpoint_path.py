"""Resolves a checkpoint or tokenizer to a local folder: a given folder, or the hub's cache after a download.

Any process; no state. Imports no torch: the tokenize and detokenize tasks are small processes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from slipstream.core.chat_messages import TEMPLATE_FOLDER
from slipstream.core.errors import ConfigError

_TOKENIZER_FILES = ("*.json", "tokenizer*", "*.model", "*.txt", "*.jinja")
_TOKENIZER_NAMES = ("*token*", "vocab.*", "*.model", "*.tiktoken")
_CHECKPOINT_FILES = (*_TOKENIZER_FILES, "*.safetensors")
_HEAD_FILES = ("*.json", "*.safetensors")
_TWICE = ("original/*", "metal/*", "consolidated*")  # the same weights for other programs, as gpt-oss and Mistral have
_ACCEPTED = "accepted: a checkpoint folder, a .gguf file or a hub id like org/name"
_PICKLED_FILES = ("*.bin", "*.pt")  # many heads are published only as pickled state dicts


def resolve_checkpoint(model: str) -> Path:
    """The local folder of a checkpoint path, or of a hub id such as "org/name" (downloaded, or from the hub's cache).

    A GGUF file is converted once into the user's cache.  Raises ConfigError if it is neither a folder nor a GGUF file
    and cannot be downloaded.
    """
    path = Path(model).expanduser()
    if _is_gguf(path):
        return _converted(path)
    return path if path.is_dir() else _fetch("model", model, _CHECKPOINT_FILES)


def resolve_head(field: str, folder: str) -> Path:
    """The local folder of a draft head, whose weights may be pickled. field: names it in errors.

    Pickled files are downloaded only if there are no safetensors.
    """
    path = Path(folder).expanduser()
    if path.is_dir():
        return path
    fetched = _fetch(field, folder, _HEAD_FILES)
    return fetched if any(fetched.glob("*.safetensors")) else _fetch(field, folder, (*_HEAD_FILES, *_PICKLED_FILES))


def resolve_tokenizer(tokenizer: str) -> Path:
    """The folder or file for `TextTokenizer.load`; of a hub id, downloads the tokenizer without weights."""
    path = Path(tokenizer).expanduser()
    if _is_gguf(path):
        return _converted(path)
    return path if path.exists() else _fetch("tokenizer", tokenizer, _TOKENIZER_FILES)


def has_tokenizer(path: Path) -> bool:
    """Whether the file is a tokenizer, or the folder has files of one."""
    return not path.is_dir() or any(file for pattern in _TOKENIZER_NAMES for file in path.glob(pattern))


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def _converted(path: Path) -> Path:
    from slipstream.nn.gguf.convert import converted  # imports torch, which few users of this module need

    return converted(path)


def _fetch(field: str, name: str, files: tuple[str, ...]) -> Path:
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        path = Path(name).expanduser()
        missing = "no such file" if path.suffix == ".gguf" else "no such folder"
        raise ConfigError(field, name, f"{'a file, and not a .gguf' if path.is_file() else missing}; {_ACCEPTED}")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files), ignore_patterns=[*_TWICE]))
    except huggingface_hub.errors.RepositoryNotFoundError as error:  # the hub says this of gated ones, too
        reason = "it has none of this name, or shows it only to accounts that may read it (HF_TOKEN)"
        raise ConfigError(field, name, f"no such folder, and not to be had from the hub: {reason}") from error
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        told = f"no such folder, and not to be had from the hub: {reason}"
        raise ConfigError(field, name, f"{told}; {_ACCEPTED}") from error


def copy_templates(model: Path, output: Path) -> None:
    """The chat templates that a checkpoint has beside the usual one, to another checkpoint."""
    if (model / TEMPLATE_FOLDER).is_dir():
        shutil.copytree(model / TEMPLATE_FOLDER, output / TEMPLATE_FOLDER)
