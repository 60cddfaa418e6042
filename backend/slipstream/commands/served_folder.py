"""Tells apart what `slipstream serve` is asked to serve: a checkpoint, the folder of a model, or a repository."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from slipstream.core.errors import ConfigError

CONFIG = "config.pbtxt"
_OF_CHECKPOINTS = ("config.json", "*.safetensors", "*.gguf")


def is_model_folder(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def is_repository(folder: Path) -> bool:
    return not is_model_folder(folder) and any(folder.glob(f"*/{CONFIG}"))


def models_of(repository: Path) -> list[str]:
    return sorted(str(path.parent) for path in repository.glob(f"*/{CONFIG}"))


def is_checkpoint(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in _OF_CHECKPOINTS)


def take_argument(arguments: argparse.Namespace) -> None:
    """Turn `serve FOLDER_OR_ID` into --model, or --model-repository and --load. Raises ConfigError."""
    given = arguments.server_arguments
    if not given or given[0].startswith("-"):
        return
    what, *arguments.server_arguments = given
    if arguments.model or arguments.model_repository:
        raise ConfigError("argument", what, "given beside --model or --model-repository; accepted: one of them")
    folder = Path(what).resolve()
    if is_model_folder(folder):
        arguments.model_repository, arguments.load = folder.parent, [folder.name, *arguments.load]
    elif is_repository(folder):
        arguments.model_repository = folder
    else:
        arguments.model = what


def check_model(model: str) -> None:
    """Raises ConfigError for a folder of Triton's in place of a checkpoint."""
    folder = Path(model)
    if is_checkpoint(folder):
        return
    if is_model_folder(folder):
        raise ConfigError("--model", model, f"is a model's folder, no checkpoint; accepted: {_instead(folder)}")
    if is_repository(folder):
        raise ConfigError("--model", model, f"is a model repository; accepted: --model-repository {folder}")


def check_repository(folder: Path, load: Iterable[str]) -> None:
    """Raises ConfigError for a folder that is no repository, or that lacks a model to load."""
    if not folder.is_dir():
        raise ConfigError("--model-repository", str(folder), "no such folder")
    if is_model_folder(folder):
        told = f"is the folder of one model; accepted: the folder around it: {_instead(folder)}"
        raise ConfigError("--model-repository", str(folder), told)
    if is_checkpoint(folder):
        raise ConfigError("--model-repository", str(folder), f"is a checkpoint; accepted: --model {folder}")
    folders = [path for path in folder.iterdir() if path.is_dir()]
    if folders and not is_repository(folder) and not any(any(path.glob("[0-9]*/*")) for path in folders):
        raise ConfigError("--model-repository", str(folder), f"holds no model: no folder in it has a {CONFIG}")
    for name in load:
        if not (folder / name).is_dir():
            there = ", ".join(Path(model).name for model in models_of(folder)) or "none"
            raise ConfigError("--load", name, f"no such model in {folder}; accepted: {there}")


def _instead(folder: Path) -> str:
    folder = folder.resolve()
    return f"--model-repository {folder.parent} --load {folder.name}"
