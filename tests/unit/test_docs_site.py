"""The site of docs/: it builds without a warning, and has the pages and docstrings that it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("mkdocs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_in_the_navigation(site: Path) -> None:
    told = re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(told) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    assert all((site / path.removesuffix(".md") / "index.html").is_file() for path in told if path != "index.md")


def test_the_python_api_has_its_docstrings(site: Path) -> None:
    page = (site / "api/index.html").read_text()
    for name in ("slipstream.LLM", "slipstream.SamplingParams", "slipstream.Completion"):
        assert f'id="{name}"' in page
    assert "::: slipstream" not in page


def test_no_link_leads_out_of_the_site(site: Path) -> None:
    for page in site.rglob("index.html"):
        depth = len(page.relative_to(site).parents) - 1
        out = re.findall(rf'href="((?:\.\./){{{depth + 1},}}[^"]*)"', page.read_text())
        assert out == [], page
