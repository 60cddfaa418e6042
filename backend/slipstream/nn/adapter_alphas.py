"""lora_alpha of each module of an adapter: PEFT's alpha_pattern, whose regular expressions an adapter's author wrote.

Matching one may take time without end, in which no thread of this process would go on. So patterns that repeat or
choose are matched in a process of their own, which is given some seconds.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

DEFAULT_ALPHA = 8
MATCH_TIMEOUT_S = 10.0
MOST_MATCHES = 1 << 18  # in this process; some tenths of a second
_LARGEST = 1e30
_SIMPLE = re.compile(r"(?:[\w.^$-]|\\[.dw])*", re.ASCII)  # one way to match a name
_MATCHER = """
import json, re, sys
patterns, names = json.load(sys.stdin)
found = [re.compile(pattern) for pattern in patterns]
print(json.dumps([next((at for at, one in enumerate(found) if one.fullmatch(name)), -1) for name in names]))
"""


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= _LARGEST


def are_patterns(patterns: object) -> bool:
    """Whether this is an alpha_pattern."""
    if not isinstance(patterns, dict) or not all(is_number(alpha) for alpha in patterns.values()):
        return False
    try:
        return all(re.compile(_of_ends(pattern)) for pattern in patterns)
    except (re.error, RecursionError, OverflowError):
        return False


def alphas_of(config: Mapping[str, Any], modules: Sequence[str]) -> list[float]:
    """The alpha of each module: the first pattern that matches the end of its name. Raises ValueError with a reason."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    alphas = [*patterns.values(), config.get("lora_alpha", DEFAULT_ALPHA)]  # -1: no pattern
    return [float(alphas[at]) for at in _first_matches(list(patterns), modules)]


def _of_ends(pattern: str) -> str:
    return rf"(.*\.)?(?:{pattern})"


def _first_matches(patterns: Sequence[str], names: Sequence[str]) -> list[int]:
    """The index of each name's first pattern, or -1."""
    ends = [_of_ends(pattern) for pattern in patterns]
    if len(patterns) * len(names) <= MOST_MATCHES and all(_SIMPLE.fullmatch(pattern) for pattern in patterns):
        found = [re.compile(end) for end in ends]
        return [next((at for at, one in enumerate(found) if one.fullmatch(name)), -1) for name in names]
    command = [sys.executable, "-I", "-S", "-c", _MATCHER]
    given = json.dumps([ends, list(names)])
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=MATCH_TIMEOUT_S, check=True)
    except subprocess.TimeoutExpired:
        raise ValueError(f"takes longer than {MATCH_TIMEOUT_S:g} s to match; accepted: names of modules") from None
    except subprocess.CalledProcessError as error:
        raise ValueError(f"cannot be matched: {error.stderr[-200:].strip()}") from None
    indices: list[int] = json.loads(done.stdout)
    return indices
