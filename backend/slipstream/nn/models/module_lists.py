"""Lists of modules in config.json's quantization_config: which of the model's linear layers an entry means."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache

import regex

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.family import LLAMA_NAMES
from slipstream.nn.stored_names import Names, tensor_name

HEAD = tensor_name(LLAMA_NAMES, "lm_head", 0)
TEXT_MODEL = "language_model"
PATTERN = "re:"  # before a regular expression
EXPRESSION_TIMEOUT_S, LIST_TIMEOUT_S = 1.0, 60.0  # of one expression with one module; of a list with all modules
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


def modules_meant(section: HFConfig, key: str, entries: tuple[str, ...], modules: Iterable[str]) -> list[str]:
    """Those of these modules that any of the entries under `key` means.

    Raises ConfigError for expressions that take too long: some take for ever, and their author is a stranger.
    """
    is_meant, deadline, found = matcher(entries), time.monotonic() + LIST_TIMEOUT_S, []
    for module in modules:
        try:
            if is_meant(module):
                found.append(module)
        except TimeoutError as error:
            raise section.error(key, str(error)) from None
        if time.monotonic() > deadline:
            raise section.error(key, f"takes more than {LIST_TIMEOUT_S:g} s to match; accepted: names of modules")
    return found


def entries_of_transformers(section: HFConfig, key: str) -> tuple[str, ...]:
    """The list of modules under `key`, as transformers reads it. Raises ConfigError for an entry that is no pattern."""
    entries = entries_of(section, key)
    try:
        entries = tuple(map(_as_transformers_reads, entries))
    except ValueError as error:
        raise section.error(key, str(error)) from None
    check_patterns(section, key, entries)
    return entries


def _as_transformers_reads(entry: str) -> str:
    """With the mark of an expression, if only one can be meant: transformers takes each entry for one that ends where a
    part of a name does. Flags stay in front, where Python wants them. Raises ValueError."""
    if entry.startswith(PATTERN) or not _ONLY_EXPRESSION.search(entry):
        return entry
    _compiled(entry, entry)  # what is told is of the entry as it was written
    rest = _FLAGS.sub("", entry)
    return rf"{PATTERN}{entry.removesuffix(rest)}(?:{rest})(?:(?<=\.)|(?=\.|$))"


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
    """The entries of a list that spell module names in one way."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._patterns: list[Callable[[str], bool]] = []
        self._names: set[str] = set()
        for entry in entries:
            if entry.startswith(PATTERN):
                self._patterns.append(_compiled(entry.removeprefix(PATTERN), entry))
            elif "*" in entry:
                self._patterns.append(_compiled(re.escape(entry).replace(r"\*", ".*") + r"\Z", entry))
            else:
                self._names.add(entry.strip("."))  # some lists end each entry with a dot
        self._lengths = sorted({name.count(".") + 1 for name in self._names})
        self.is_any = bool(self._patterns or self._names)

    def mean(self, module: str) -> bool:
        if self._patterns and any(is_match(module) for is_match in self._patterns):
            return True
        if len(self._names) <= _FEW:
            return bool(self._names) and any(f".{name}." in f".{module}." for name in self._names)
        parts = module.split(".")
        runs = ((start, start + size) for size in self._lengths for start in range(len(parts) - size + 1))
        return any(".".join(parts[start:stop]) in self._names for start, stop in runs)


# Names and globs have none of these.
_ONLY_EXPRESSION = re.compile(r"^\.\*|[\\^$|()\[\]{}+?]")
_FLAGS = re.compile(r"\A(?:\(\?[a-zA-Z]+\))+")  # of a whole expression
_REPEATS, _REPEATED_GROUP = re.compile(r"[*+?{]"), re.compile(r"\)[*+?{]")


def _is_quick(pattern: str) -> bool:
    """Whether each module's name takes less than some milliseconds: the usual case, in which nobody looks at a clock,
    which takes 2 us."""
    is_short = len(_REPEATS.findall(pattern)) <= 3 and pattern.count("|") <= 4
    return is_short and not _REPEATED_GROUP.search(pattern)


def _compiled(pattern: str, entry: str) -> Callable[[str], bool]:
    """Whether a module's name begins with what the pattern describes, or TimeoutError. Raises ValueError."""
    try:
        plain, timed = re.compile(pattern), regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{entry!r} is not a regular expression: {error}; accepted: names of modules") from None
    if _is_quick(pattern):
        return lambda module: plain.match(module) is not None

    def is_match(module: str) -> bool:
        try:
            return timed.match(module, timeout=EXPRESSION_TIMEOUT_S) is not None
        except TimeoutError:
            told = f"{entry!r} takes more than {EXPRESSION_TIMEOUT_S:g} s to match {module!r}"
            raise TimeoutError(f"{told}; accepted: names of modules") from None

    return is_match


def groups_of(groups: HFConfig, modules: Iterable[str]) -> list[str]:
    """The names of the config groups (of compressed-tensors) whose targets mean these linear layers; "": none does.

    A target that names modules comes before one of all linear layers.
    """
    modules, of_all = tuple(modules), ""
    meant: dict[str, Collection[str]] = {}
    for name in groups.values:
        section = groups.section(name)
        if section is not None:
            entries = entries_of(section, "targets")
            meant[name] = frozenset(modules_meant(section, "targets", entries, modules))
            of_all = of_all or (name if LINEAR in entries else "")

    def group_of(module: str) -> str:
        return next((name for name, meant_by in meant.items() if module in meant_by), of_all)

    return [group_of(module) for module in modules]
