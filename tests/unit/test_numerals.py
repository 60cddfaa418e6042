"""Numbers as text: the engine, the C++ backend and the gateway read the same, and none reads what another refuses."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from slipstream.core.config_parse import parse_parameters
from slipstream.core.errors import ConfigError, RequestError
from slipstream.core.numerals import read_decimal, read_whole
from slipstream.core.setting_values import read_float, read_int
from slipstream.encoders.parameters import Parameters
from slipstream.server.catalog import Model

READERS: dict[str, Callable[[str], float]] = {"long": read_whole, "double": read_decimal}
NO_NUMBERS = ["", " ", "1_0", "1 0", "10x", "x10", "0x10", "--1", "+-1", "-+1", "+", "-", ".", "1e", "e5", "1e+"]
NO_NUMBERS += ["\u0661\u0660", "\uff11", "\u00a01", "inf", "-Infinity", "nan", "1,5", "1.5.5", "1e5.5", "1f", "1e999"]


def read_by_cpp(folder: Path, root: Path, cases: list[tuple[str, str]]) -> list[str]:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    flags = ["-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover"]
    source, program = root / "tests" / "unit" / "numerals_cases.cc", folder / "cases"
    subprocess.run([compiler, *flags, f"-I{root / 'backend' / 'triton'}", str(source), "-o", str(program)], check=True)
    rows = "\n".join(f"{kind} {text.encode().hex() or '-'}" for kind, text in cases)
    return subprocess.run([str(program)], input=rows, capture_output=True, text=True, check=True).stdout.split()


def read_by_python(kind: str, text: str) -> str:
    try:
        number = READERS[kind](text)
    except ValueError:
        return "error"
    return str(number) if isinstance(number, int) else number.hex()


def test_python_and_cpp_read_the_same(tmp_path: Path, root: Path) -> None:
    rng = random.Random(5)
    texts = [*NO_NUMBERS, " 10\t", "+7", "-0", "007", "1.", ".5", "-2.5e-3", "60", "1e3", "9223372036854775807"]
    texts += ["".join(part) for part in itertools.product("+-_.1 e", repeat=4)]
    texts += ["".join(rng.choice("0123456789+-.eE_ \t\x00x") for _ in range(rng.randrange(1, 9))) for _ in range(4000)]
    cases = [(kind, text) for text in texts for kind in READERS]
    by_python = [read_by_python(*case) for case in cases]
    by_cpp = read_by_cpp(tmp_path, root, cases)
    numbers = [read if read == "error" else str(float.fromhex(read)) for read in by_cpp]
    expected = [read if read == "error" else str(float.fromhex(read)) for read in by_python]
    different = {case: pair for case, *pair in zip(cases, numbers, expected, strict=True) if pair[0] != pair[1]}
    assert not {case: pair for case, pair in different.items() if "e-" not in case[1].lower()}  # below what C++ holds
    assert sum(read != "error" for read in by_cpp) > 1000


@pytest.mark.parametrize("text", [text for text in NO_NUMBERS if text and text.isascii()] + ["\u0661\u0660"])
def test_no_reader_takes_what_is_no_number(tmp_path: Path, text: str) -> None:
    for name, accepted in (("max_num_seqs", "an integer >= 1"), ("drain_timeout_s", "a number >= 0")):
        with pytest.raises(ConfigError, match=f"^{name}=.*accepted: {accepted}"):
            parse_parameters({name: text, "model": str(tmp_path)}, tmp_path)
    with pytest.raises(ConfigError, match=f"^most={re.escape(repr(text.strip()))}: accepted: a "):
        Parameters({"most": text}).integer("most", 1, 0, 100)
    with pytest.raises(ConfigError, match=f"^most={re.escape(repr(text.strip()))}: accepted: a "):
        Parameters({"most": text}).number("most", 1, 0, 100)
    for read in (read_int, read_float):
        with pytest.raises(RequestError, match=r"^top_k: got .*, accepted: "):
            read("top_k", text)


@pytest.mark.parametrize(("text", "length"), [("10", 10), (" +10 ", 10), ("1_0", 0), ("\u0661\u0660", 0)])
def test_the_gateway_reads_a_models_parameters_as_the_engine_does(text: str, length: int) -> None:
    model = Model("llm", "llm", 0, settings={"default_max_tokens": text, "tokens_per_block": text})
    assert (model.default_max_tokens, model.block_size) == ((length, length) if length else (16, 64))


@pytest.mark.parametrize("kind", READERS)
def test_a_long_text_that_is_no_number_takes_no_square_of_its_length(kind: str) -> None:
    """The interpreter's lock is held meanwhile: of a request's `temperature` it would stop the whole engine."""
    began = time.process_time()
    for text in ("1" * 200_000 + "x", "1." + "1" * 200_000 + "x", "." + "1" * 200_000 + "e", " " * 200_000 + "x"):
        with pytest.raises(ValueError):
            READERS[kind](text)
    assert time.process_time() - began < 1, "8 minutes, where digits can be divided in several ways"
