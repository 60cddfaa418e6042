"""Reads the description of an encoder checkpoint in Hugging Face's layout: kind, pooling, labels, limits."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.core.errors import ConfigError

PACKAGE = "package:"
CLASSIFIER, SENTENCE = "classifier", "sentence"
_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers, by the last part of their type
_FIRST_POSITIONS_UNUSED = ("roberta", "xlm-roberta", "camembert", "mpnet")


@dataclass(frozen=True)
class Checkpoint:
    """kind: `classifier` gives one logit per label, `sentence` one vector of `width` (normalised) per text."""

    folder: Path
    kind: str
    width: int
    max_tokens: int
    vocab_size: int
    pad_id: int
    pooling: str
    labels: tuple[str, ...]
    is_multi_label: bool
    input_names: tuple[str, ...]


def with_labels(checkpoint: Checkpoint, labels: tuple[str, ...]) -> Checkpoint:
    """For an exported classifier whose config.json is its encoder's: one logit, with a sigmoid, for each label."""
    return replace(checkpoint, kind=CLASSIFIER, width=len(labels), labels=labels, is_multi_label=True)


def find_engine(name: str, base: Path) -> Path:
    """A file or folder, relative to base, or within a package as `package:<installed package>/<place>`."""
    if not name.startswith(PACKAGE):
        return (base / name).resolve()
    folder, _, last = name.rpartition("/")
    return find_checkpoint(folder, base) / last


def find_checkpoint(name: str, base: Path) -> Path:
    """The folder of `package:<installed package>/<folder>`, of a path (relative ones count from base) or of a hub id.

    Raises ConfigError that says which of these was tried.
    """
    if name.startswith(PACKAGE):
        return _in_package(name)
    folder = (base / name).resolve()
    if folder.is_dir():
        return folder
    if name.count("/") == 1 and not name.startswith((".", "/")):
        return _from_hub(name)
    raise ConfigError("model", name, f"no such folder: {folder}")


def _in_package(name: str) -> Path:
    package, _, inner = name.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        told = f"the Python package {package!r} is not installed; `make encoders` installs the default encoder"
        raise ConfigError("model", name, told)
    folder = Path(next(iter(spec.submodule_search_locations))) / inner
    if not folder.is_dir():
        raise ConfigError("model", name, f"the package {package!r} has no folder {inner!r}")
    return folder


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.txt", "*.safetensors", "1_Pooling/*"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises many types, which all mean that there is no checkpoint
        raise ConfigError("model", name, f"neither a folder nor reachable on the hub ({error})") from error


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint's description. Raises ConfigError for encoders that are not supported."""
    config = _json(folder / "config.json")
    architecture = str((config.get("architectures") or ["?"])[0])
    is_classifier = architecture.endswith("ForSequenceClassification")
    if not is_classifier and not (folder / "1_Pooling/config.json").is_file() and not architecture.endswith("Model"):
        accepted = "accepted: a ...ForSequenceClassification, or a sentence encoder (...Model, 1_Pooling/config.json)"
        raise ConfigError("model", architecture, accepted)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError("model", str(folder), "no tokenizer.json; save the checkpoint with a fast tokenizer")
    if not is_classifier:
        _refuse_unknown_modules(folder)
    return _described(folder, _filled_in(folder), is_classifier)


def _described(folder: Path, config: Any, is_classifier: bool) -> Checkpoint:
    """config: a Hugging Face configuration, which knows each family's own names and defaults."""
    inputs = ["input_ids", "attention_mask"]
    if (getattr(config, "type_vocab_size", 0) or 0) > 1:
        inputs.append("token_type_ids")
    labels = tuple(str(config.id2label[key]) for key in sorted(config.id2label)) if is_classifier else ()
    return Checkpoint(
        folder=folder,
        kind=CLASSIFIER if is_classifier else SENTENCE,
        width=len(labels) if is_classifier else int(config.hidden_size),
        max_tokens=_max_tokens(folder, config),
        vocab_size=int(config.vocab_size),
        pad_id=int(config.pad_token_id or 0),
        pooling=_pooling(folder),
        labels=labels,
        is_multi_label=config.problem_type == "multi_label_classification",
        input_names=tuple(inputs),
    )


def _filled_in(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of many kinds: an unknown family, a value of a wrong type
        first = str(error).strip().splitlines()[0]
        raise ConfigError("model", str(folder), f"transformers cannot read its config.json: {first}") from error


def _max_tokens(folder: Path, config: Any) -> int:
    """The sentence encoder's own limit, else the number of positions (RoBERTa reserves the first two)."""
    sentence = folder / "sentence_bert_config.json"
    limit = _json(sentence).get("max_seq_length") if sentence.is_file() else None
    if limit:
        return int(limit)
    positions = int(getattr(config, "max_position_embeddings", 512))
    return positions - 2 if config.model_type in _FIRST_POSITIONS_UNUSED else positions


def _refuse_unknown_modules(folder: Path) -> None:
    """Refuse sentence encoders with modules after the pooling, such as a dense layer."""
    path = folder / "modules.json"
    if not path.is_file():
        return
    modules = json.loads(path.read_text(encoding="utf-8"))
    names = [str(module["type"]).rsplit(".", 1)[-1] for module in modules]
    unknown = [name for name in names if name not in _MODULES]
    if unknown:
        raise ConfigError("model", ", ".join(unknown), f"a module of modules.json; accepted: {', '.join(_MODULES)}")


def _pooling(folder: Path) -> str:
    """Raises ConfigError unless mean or cls. Newer sentence-transformers write one key `pooling_mode`."""
    path = folder / "1_Pooling/config.json"
    if not path.is_file():
        return "mean"
    config = _json(path)
    asked = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
    named = config.get("pooling_mode")
    if named in _POOLINGS.values() and not asked:
        return str(named)
    if named or len(asked) != 1 or asked[0] not in _POOLINGS:
        given = ", ".join([*asked, *([str(named)] if named else [])])
        raise ConfigError("model", given, f"pooling; accepted: one of {', '.join(_POOLINGS)}")
    return _POOLINGS[asked[0]]


def _json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            "model", str(path.parent), f"no {path.name}: not a checkpoint in Hugging Face's layout"
        ) from None
    except ValueError as error:
        raise ConfigError("model", str(path), f"not JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError("model", str(path), "a JSON object is wanted")
    return loaded
