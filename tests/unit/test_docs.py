"""The tables in docs/ are those of the code; docs/security.md has every bound, with the default that it has there."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from slipstream.commands import serve_openai
from slipstream.core.config import EngineConfig
from slipstream.core.config_parse import value_at
from slipstream.core.config_table import PARAMETERS

ROOT = Path(__file__).resolve().parents[2]
IS_BOUND = re.compile(r"(^|_)MAX(_|$)|TIMEOUT|_LIMIT|_BUDGET|_QUOTA|_(MS|S)$", re.IGNORECASE)
IS_PARAMETER_BOUND = re.compile(IS_BOUND.pattern + "|_BYTES$", re.IGNORECASE)
CPP_CONSTANTS = re.compile(r"constexpr\s+((?:\w+::)*\w[\w ]*?(?:<\w+>)?)\s+(k\w+\s*[=({][^;]+);")
CPP_CONSTANT = re.compile(r"(k\w+)\s*(?:=\s*([^;,]+)|[({]([^(){}]+)[)}])")
IS_CPP_BOUND = re.compile("Max|Longest|Most|Timeout|Limit|Budget|Reserve|End$|Healthy")
CPP_UNITS = {"microseconds": 1e-6, "milliseconds": 1e-3, "seconds": 1, "minutes": 60}
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "ms": 1e-3, "us": 1e-6, "s": 1.0}

# names that look like a client's bound and are none -> why
NO_BOUNDS = {
    "memory_bytes": "the size of the KV cache",
    "kv_cache_host_memory_bytes": "the size of the KV cache in host memory",
    "ngram_max": "a length that n-gram drafting looks for",
    "MAX_INT32": "a type's range",
    "MAX_CPU_ROWS": "how an encoder's texts are divided into runs",
    "MAX_GPU_ROWS": "how an encoder's texts are divided into runs",
    "MAX_GRAPH_TOKENS": "which runs of an encoder are captured",
    "MAX_TIMEOUT_US": "a type's range",
    "MAX_BIAS": "a setting's range: contracts.md",
    "MAX_TOKENS": "captured prompt shapes",
    "MAX_DECODE_ROWS": "captured decode shapes",
    "MAX_PROMPT_ROWS": "rows of one product of prompt log-probabilities",
    "UNARY_TIMEOUT_S": "the gateway's own questions to Triton",
    "GRACE_S": "the gateway's own waiting for Triton",
    "REFRESH_S": "a period",
    "RESTART_S": "a period",
    "RETRY_AFTER_S": "a hint to clients",
    "KEEP_ALIVE_S": "an idle connection, which counts among --max-connections",
    "kLongestWatchPeriod": "a period",
    "kLongest": "a period: of starting again an engine that dies",
    "kMostSeconds": "a type's range",
}


def make_docs():
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "build" / "make_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", make_docs().PAGES)
def test_a_page_is_up_to_date(page: str) -> None:
    text = (ROOT / "docs" / page).read_text("utf-8")
    assert make_docs().render(text) == text, "run: python build/make_docs.py"


def test_every_table_has_its_place() -> None:
    module = make_docs()
    text = "".join((ROOT / "docs" / page).read_text("utf-8") for page in module.PAGES)
    assert [name for name in module.BLOCKS if f"<!-- table: {name} -->" not in text] == []
    assert "| `text_input` |" in text and "| `max_num_seqs` |" in text and text.count("\n| `") > 150


# ---------------------------------------------------------------- docs/security.md


def rows() -> dict[str, str]:
    """Name -> default, as the page says."""
    text = (ROOT / "docs/security.md").read_text("utf-8").partition("\n## Limits")[2]
    return dict(re.findall(r"^\| `([^`]+)` \| ([^|]+?) \|", text, re.MULTILINE))


def as_number(text: str) -> float:
    """ "256 MiB" -> bytes, "5 ms" -> seconds, "1024" as it is."""
    number, _, unit = text.partition(" ")
    return float(number.replace(",", "")) * UNITS.get(unit, 1)


def in_seconds(name: str, value: float) -> float:
    scale = {"_ms": 1e-3, "_MS": 1e-3, "Ms": 1e-3, "_us": 1e-6}
    return value * next((factor for suffix, factor in scale.items() if name.endswith(suffix)), 1)


def config_bounds() -> Iterator[tuple[str, float]]:
    for parameter in PARAMETERS:
        default = value_at(EngineConfig(), parameter.path)
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        if IS_PARAMETER_BOUND.search(parameter.name) and is_number:
            yield parameter.name, in_seconds(parameter.name, default)


def module_constants(path: Path) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
        ):
            yield from ((ast.unparse(name), value) for name, value in zip(node.targets[0].elts, node.value.elts))


def python_bounds() -> Iterator[tuple[str, float]]:
    """Public constants; a name has to be clear without its module's."""
    for folder in ("core", "encoders", "engine", "protocol", "tokenizer", "worker", "server"):
        for path in sorted((ROOT / "backend/slipstream" / folder).rglob("*.py")):
            for name, value in module_constants(path):
                is_number = not any(isinstance(node, ast.Name | ast.Call | ast.Tuple) for node in ast.walk(value))
                if re.fullmatch("[A-Z][A-Z0-9_]+", name) and IS_BOUND.search(name) and is_number:
                    yield name, in_seconds(name, eval(ast.unparse(value), {"__builtins__": {}}))


def option_bounds() -> Iterator[tuple[str, float]]:
    parser = argparse.ArgumentParser()
    serve_openai.add_arguments(parser)
    [group] = [group for group in parser._action_groups if group.title == "access and limits"]
    for action in group._group_actions:
        if isinstance(action.default, int | float) and not isinstance(action.default, bool):
            yield action.option_strings[0], in_seconds(action.dest, action.default)


def cpp_bounds() -> Iterator[tuple[str, float]]:
    """Bounds of both forms: `seconds kName(10)` and `auto kName = std::chrono::seconds(10)`."""
    for path in sorted((ROOT / "backend/triton").glob("*.[ch]*")):
        for kind, declared in CPP_CONSTANTS.findall(path.read_text("utf-8")):
            for name, assigned, constructed in CPP_CONSTANT.findall(declared):
                if IS_CPP_BOUND.search(name):
                    yield name, in_seconds(name, cpp_value(kind, assigned.strip() or constructed))


def cpp_value(kind: str, expression: str) -> float:
    """A duration in seconds, whether its unit is the declared type or part of the expression."""
    unit = re.fullmatch(r"std::chrono::(\w+)\((.+)\)", expression)
    scale = CPP_UNITS.get(unit[1] if unit else kind.rpartition("::")[2], 1)
    number = re.sub(r"(?<=\d)(u|ul|ull|U|UL|ULL)\b", "", unit[2] if unit else expression)
    return scale * float(eval(number, {"__builtins__": {}}))


FOUND = {
    "parameters of config.pbtxt": config_bounds,
    "constants": python_bounds,
    "options of the gateway": option_bounds,
    "constants of the backend": cpp_bounds,
}


@pytest.mark.parametrize("where", FOUND)
def test_the_page_has_every_bound_with_its_default(where: str) -> None:
    found = {name: value for name, value in FOUND[where]() if name not in NO_BOUNDS}
    assert len(found) > 5, "this test does not see the bounds any more"
    page = rows()
    assert sorted(set(found) - set(page)) == [], "docs/security.md lacks a row `| `name` | default | what | above it |`"
    assert {name: page[name] for name, value in found.items() if as_number(page[name]) != value} == {}


def test_the_page_has_no_bound_that_is_gone() -> None:
    found = {name for find in FOUND.values() for name, _ in find()}
    assert sorted(set(rows()) - found) == []
