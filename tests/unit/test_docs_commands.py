"""Commands and links of README.md and docs/ are those of the code, work after set-up, and lines stay readable."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from slipstream import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
MAX_PROSE_CHARS = 180
MAX_CELL_CHARS = 240
BARE = re.compile(r"(python3? (?!-m venv)|pytest |slipstream [a-z-]+ )")
OPTION = re.compile(r"(?<= )--[a-z][a-z-]*")
SCRIPT = re.compile(r"\.venv/bin/python ((?:build|tests|client_examples)/[\w/.-]+\.py)(.*)")
VERB = re.compile(r"\.venv/bin/slipstream ([a-z][a-z-]*)(.*)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def parts_of(page: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(lines of prose and tables, lines of code blocks; a line that a backslash continues is one with the next)."""
    pieces = re.split(r"^ *```.*$", page.read_text("utf-8"), flags=re.MULTILINE)
    code = "\n".join(pieces[1::2]).replace("\\\n", " ")
    return tuple("\n".join(pieces[::2]).splitlines()), tuple(line.strip() for line in code.splitlines())


def commands(page: Path) -> Iterator[str]:
    """In code blocks and between backticks, without what follows a lone `--`: that is for another program."""
    prose, code = parts_of(page)
    inline = (re.sub(r"\s+", " ", text) for text in re.findall(r"`([^`]+)`", "\n".join(prose)))
    yield from (command.partition(" -- ")[0] for command in (*code, *inline))


@cache
def options_of_verb(verb: str) -> frozenset[str]:
    [verbs] = [action.choices for action in cli.build_parser()._actions if action.dest == "command"]
    return frozenset(verbs[verb]._option_string_actions)


@cache
def source_of(script: str) -> str:
    """A script, and the modules beside it."""
    return "\n".join(path.read_text("utf-8") for path in (ROOT / script).parent.rglob("*.py"))


def anchors(page: Path) -> set[str]:
    titles = [line.lstrip("# ") for line in parts_of(page)[0] if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_are_short(page: Path) -> None:
    prose = parts_of(page)[0]
    assert [line for line in prose if len(line) > MAX_PROSE_CHARS and not line.startswith(("|", "!"))] == []
    if page.parent.name != "measurements":
        cells = [cell for line in prose if line.startswith("|") for cell in line.split(" | ")]
        assert [cell for cell in cells if len(cell) > MAX_CELL_CHARS] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_name_the_environment_that_set_up_makes(page: Path) -> None:
    found = [command for command in commands(page) if BARE.match(command)]
    assert found == [], "write .venv/bin/python, .venv/bin/pytest or .venv/bin/slipstream"


@pytest.mark.parametrize("folder", ["build", "client_examples"])
def test_programs_say_so_too(folder: str) -> None:
    for program in (ROOT / folder).glob("*.py"):
        told = ast.get_docstring(ast.parse(program.read_text("utf-8"))) or ""
        bare = [line for line in told.splitlines() if BARE.match(line.strip())]
        assert bare == [], f"{folder}/{program.name}: write .venv/bin/python and the path from the repository"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_have_only_options_that_exist(page: Path) -> None:
    for command in commands(page):
        if found := VERB.search(command):
            unknown = set(OPTION.findall(found[2])) - options_of_verb(found[1])
            assert not unknown, f"{command}: no {sorted(unknown)}"
        elif found := SCRIPT.search(command):
            assert (ROOT / found[1]).exists(), f"{command}: no such file"
            source = source_of(found[1])
            names = {name: {f'"{name}"', f'"{name.strip("-").replace("-", "_")}"'} for name in OPTION.findall(found[2])}
            unknown = [name for name, spellings in names.items() if not any(s in source for s in spellings)]
            assert not unknown, f"{command}: no {unknown}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_titles_that_exist(page: Path) -> None:
    for file, anchor in re.findall(r"\]\(((?:[\w./-]+\.md)?)#([^)]+)\)", page.read_text("utf-8")):
        target = page.parent / file if file else page
        assert anchor in anchors(target), f"{name_of(page)}: {file}#{anchor}"


def test_the_commands_are_seen() -> None:
    found = [command for page in PAGES for command in commands(page)]
    assert sum(bool(VERB.search(command)) for command in found) > 10
    assert sum(bool(SCRIPT.search(command)) for command in found) > 20
