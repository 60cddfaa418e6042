"""The tables in docs/ are those of the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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
