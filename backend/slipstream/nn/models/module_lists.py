"""Lists of modules in config.json's quantization_config: which of the model's linear layers an entry means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.family import LLAMA_NAMES
from slipstream.nn.stored_names import Names, tensor_name

HEAD = tensor_name(LLAMA_NAMES, "lm_head", 0)
TEXT_MODEL = "language_model"
PATTERN = "re:"  # before a regular expression
LINEAR = "Linear"  # every linear layer, as a target
ATTENTION_PARTS = ("q", "k", "v", "o")
MLP_PARTS = ("gate", "up", "down")


def linear_modules(names: Names, parts: Sequence[str], layers: Iterable[int], num_experts: int = 0) -> tuple[str, ...]:
    """The checkpoint's names of these parts in these layers; with num_experts, of each expert."""
    every = parts if not num_experts else [f"{part}.{expert}" for expert in range(num_experts) for part in parts]
    return tuple(dict.fromkeys(tensor_name(names, part, layer) for layer in layers for part in every))


def entries_of(section: HFConfig, key: str) -> list[str]:
    """The list of modules under `key`. Raises ConfigError for an entry that is no pattern."""
    entries = section.strings(key)
    check_patterns(section, key, entries)
    return entries


def check_patterns(section: HFConfig, key: str, entries: Iterable[str]) -> None:
    for entry in entries:
        try:
            re.compile(entry.removeprefix(PATTERN) if entry.startswith(PATTERN) else "")
        except re.error as error:
            raise section.error(key, f"{entry!r} is not a regular expression: {error}") from None


def matches(entry: str, module: str) -> bool:
    """Whether an entry of a list of modules means this one: "re:" and a pattern, a whole name, or components of one.

    Models that also see may call it language_model.model.… or model.language_model.…, and their head likewise.
    """
    if TEXT_MODEL not in entry:
        return _matches(entry, module)
    names = (module, f"{TEXT_MODEL}.{module}", module.replace("model.", f"model.{TEXT_MODEL}.", 1))
    return any(_matches(entry, name) for name in names)


def _matches(entry: str, module: str) -> bool:
    if entry.startswith(PATTERN):
        return re.match(entry.removeprefix(PATTERN), module) is not None
    if "*" in entry:
        return re.fullmatch(re.escape(entry).replace(r"\*", ".*"), module) is not None
    return f".{entry.strip('.')}." in f".{module}."  # some lists end each entry with a dot


def groups_of(groups: HFConfig, modules: Iterable[str]) -> list[str]:
    """The names of the config groups (of compressed-tensors) whose targets mean these linear layers; "": none does.

    A target that names modules comes before one of all linear layers.
    """
    targets = {name: entries_of(section, "targets") for name in groups.values if (section := groups.section(name))}
    of_all = next((name for name, entries in targets.items() if LINEAR in entries), "")

    def group_of(module: str) -> str:
        named = (name for name, entries in targets.items() if any(matches(entry, module) for entry in entries))
        return next(named, of_all)

    return [group_of(module) for module in modules]
