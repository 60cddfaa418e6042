"""Lists of modules in config.json's quantization_config: which of the model's linear layers an entry means."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

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


def entries_of(section: HFConfig, key: str) -> tuple[str, ...]:
    """The list of modules under `key`. Raises ConfigError for an entry that is no pattern."""
    entries = tuple(section.strings(key))
    check_patterns(section, key, entries)
    return entries


def check_patterns(section: HFConfig, key: str, entries: tuple[str, ...]) -> None:
    try:
        matcher(entries)
    except ValueError as error:
        raise section.error(key, str(error)) from None


def matches(entry: str, module: str) -> bool:
    """Whether an entry of a list of modules means this one: "re:" and a pattern, a whole name, or components of one.

    Models that also see may call it language_model.model.… or model.language_model.…, and their head likewise.
    """
    return matcher((entry,))(module)


@lru_cache(maxsize=64)
def matcher(entries: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether any of the entries means a module; some lists have an entry for each of 300 routers and norms, and some
    models 70,000 modules. Raises ValueError for an entry that is no pattern."""
    own, of_text = (_Entries(entry for entry in entries if (TEXT_MODEL in entry) == kind) for kind in (False, True))

    def is_meant(module: str) -> bool:
        if own.mean(module):
            return True
        names = (module, f"{TEXT_MODEL}.{module}", module.replace("model.", f"model.{TEXT_MODEL}.", 1))
        return of_text.is_any and any(of_text.mean(name) for name in names)

    return is_meant


_FEW = 8  # names that are searched for in each module sooner than its parts are looked up among them


class _Entries:
    """Of one spelling of names."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._patterns: list[re.Pattern[str]] = []
        self._names: set[str] = set()
        for entry in entries:
            if entry.startswith(PATTERN):
                self._patterns.append(_compiled(entry))
            elif "*" in entry:
                self._patterns.append(re.compile(re.escape(entry).replace(r"\*", ".*") + r"\Z"))
            else:
                self._names.add(entry.strip("."))  # some lists end each entry with a dot
        self._lengths = sorted({name.count(".") + 1 for name in self._names})
        self.is_any = bool(self._patterns or self._names)

    def mean(self, module: str) -> bool:
        if self._patterns and any(pattern.match(module) for pattern in self._patterns):
            return True
        if len(self._names) <= _FEW:
            return bool(self._names) and any(f".{name}." in f".{module}." for name in self._names)
        parts = module.split(".")
        runs = ((start, start + size) for size in self._lengths for start in range(len(parts) - size + 1))
        return any(".".join(parts[start:stop]) in self._names for start, stop in runs)


def _compiled(entry: str) -> re.Pattern[str]:
    try:
        return re.compile(entry.removeprefix(PATTERN))
    except re.error as error:
        raise ValueError(f"{entry!r} is not a regular expression: {error}") from None


def groups_of(groups: HFConfig, modules: Iterable[str]) -> list[str]:
    """The names of the config groups (of compressed-tensors) whose targets mean these linear layers; "": none does.

    A target that names modules comes before one of all linear layers.
    """
    targets = {name: entries_of(section, "targets") for name in groups.values if (section := groups.section(name))}
    meant = {name: matcher(entries) for name, entries in targets.items()}
    of_all = next((name for name, entries in targets.items() if LINEAR in entries), "")

    def group_of(module: str) -> str:
        return next((name for name, is_meant in meant.items() if is_meant(module)), of_all)

    return [group_of(module) for module in modules]
