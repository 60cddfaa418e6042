"""The C++ JSON splicer against Python's json, over random objects and damaged text."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Case = tuple[str, str, str, str]  # operation, object, key, value


@pytest.fixture(scope="module")
def splice(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Callable[[list[Case]], list[str | None]]:
    """Run cases through one process: results in order, None for a missing member, "error" for a refusal."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("splice") / "cases"
    backend = root / "backend" / "triton"
    sources = [str(root / "tests" / "unit" / "json_splice_cases.cc"), str(backend / "json_splice.cc")]
    flags = ["-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover"]
    subprocess.run([compiler, *flags, f"-I{backend}", *sources, "-o", str(program)], check=True)

    def run(cases: list[Case]) -> list[str | None]:
        # an argument is never empty: 20 (a space) stands for none
        rows = [" ".join([case[0], *(part.encode().hex() or "20" for part in case[1:])]) for case in cases]
        done = subprocess.run([str(program)], input="\n".join(rows), capture_output=True, text=True, check=True)
        named = {"none": None, "error": "error"}
        return [named[line] if line in named else bytes.fromhex(line).decode() for line in done.stdout.splitlines()]

    return run


def random_value(rng: random.Random, depth: int) -> object:
    kinds = ["number", "string", "word"] + (["list", "object"] if depth else [])
    kind = rng.choice(kinds)
    if kind == "number":
        return rng.choice([0, -1, 2.5, 1e-7])
    if kind == "string":
        return "".join(rng.choice('ab"\\{}[],: é\n') for _ in range(rng.randrange(6)))
    if kind == "word":
        return rng.choice([True, False, None])
    if kind == "list":
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    return random_object(rng, depth - 1)


def random_object(rng: random.Random, depth: int = 3) -> dict[str, object]:
    return {rng.choice(["input", "output", "a", "b{", "c,"]): random_value(rng, depth) for _ in range(rng.randrange(5))}


def test_members_are_found_and_replaced_like_json_does(splice: Callable[[list[Case]], list[str | None]]) -> None:
    rng = random.Random(7)
    objects = [random_object(rng) for _ in range(300)]
    values = [random_value(rng, 2) for _ in objects]
    texts = [json.dumps(one, indent=rng.choice([None, None, 1]), ensure_ascii=False) for one in objects]
    found = splice([("get", text, "input", "") for text in texts])
    assert [None if one is None else [json.loads(one)] for one in found] == [
        [one["input"]] if "input" in one else None for one in objects
    ]
    changed = splice([("set", text, "input", json.dumps(value)) for text, value in zip(texts, values)])
    assert [json.loads(str(one)) for one in changed] == [{**one, "input": value} for one, value in zip(objects, values)]


def test_lists_are_cut_into_elements(splice: Callable[[list[Case]], list[str | None]]) -> None:
    lists = [[], [1], ["a,]", {"b": [1, 2]}, None], [[1, [2]], 3.5]]
    cut = splice([("elements", json.dumps(one), "", "") for one in lists])
    assert [[json.loads(element) for element in str(one).splitlines()] for one in cut] == lists
    assert splice([("elements", text, "", "") for text in ("{}", "[1", "")]) == ["error"] * 3


def test_equal_values_are_sorted_to_the_same_text(splice: Callable[[list[Case]], list[str | None]]) -> None:
    rng = random.Random(11)

    def shuffled(value: object) -> object:
        if isinstance(value, list):
            return [shuffled(one) for one in value]
        if isinstance(value, dict):
            return {key: shuffled(value[key]) for key in rng.sample(sorted(value), len(value))}
        return value

    objects = [random_object(rng, 4) for _ in range(300)]
    plain = splice([("sorted", json.dumps(one), "", "") for one in objects])
    others = [json.dumps(shuffled(one), indent=rng.choice([None, 1])) for one in objects]
    assert splice([("sorted", one, "", "") for one in others]) == plain
    assert [json.loads(str(one)) for one in plain] == objects


def test_strings_are_unescaped(splice: Callable[[list[Case]], list[str | None]]) -> None:
    texts = ["", "plain", 'quote " and \\ and /', "tab\tline\n", "é ☃ 😀", "\x01"]
    for ensure_ascii in (True, False):
        encoded = [json.dumps(text, ensure_ascii=ensure_ascii) for text in texts]
        assert splice([("string", one, "", "") for one in encoded]) == texts


def test_texts_are_quoted(splice: Callable[[list[Case]], list[str | None]]) -> None:
    texts = ["plain", 'quote " and \\ and /', "tab\tline\n", "é ☃ 😀", "\x01"]
    assert [json.loads(one or "") for one in splice([("quoted", one, "", "") for one in texts])] == texts


@pytest.mark.parametrize("text", ["", "[]", '{"a"', '{"a":', '{"a":1', '{"a":"x}', '{"a":[1}', "{1:2}", '{"a" 1}'])
def test_malformed_text_is_refused(splice: Callable[[list[Case]], list[str | None]], text: str) -> None:
    assert splice([("get", text, "a", "")]) == ["error"]
