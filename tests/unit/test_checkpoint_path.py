"""What is fetched of a hub's repository for heads and modules that draft, with a stand-in for the hub."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
from slipstream.core.errors import ConfigError, naming
from slipstream.nn.checkpoint_path import resolve_checkpoint, resolve_head

Fetch = Callable[..., set[str]]


def matches(file: str, patterns: list[str]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)


@pytest.fixture
def fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fetch:
    """Names of the files that come when a repository has `files`."""

    def fetched(resolve: Callable[..., Path], *files: str) -> set[str]:
        def snapshot(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
            if name != "org/name":
                raise OSError("there is none")
            for file in files:
                if matches(file, allow_patterns) and not matches(file, ignore_patterns):
                    (tmp_path / file).parent.mkdir(exist_ok=True)
                    (tmp_path / file).touch()
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        return {file.name for file in resolve("org/name").iterdir()}

    return fetched


def head(name: str) -> Path:
    return resolve_head("medusa_heads", name)


def test_pickled_files_of_a_head_come_where_there_are_no_others(fetch: Fetch) -> None:
    assert fetch(head, "config.json", "medusa_lm_head.pt") == {"config.json", "medusa_lm_head.pt"}


def test_a_head_that_is_published_twice_is_fetched_once(fetch: Fetch) -> None:
    files = ("config.json", "model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
    assert fetch(head, *files) == {"config.json", "model.safetensors"}


def test_a_checkpoint_is_fetched_without_pickled_files(fetch: Fetch) -> None:
    files = ("config.json", "model.safetensors", "pytorch_model.bin")
    assert fetch(resolve_checkpoint, *files) == {"config.json", "model.safetensors"}


def test_weights_that_are_published_twice_are_fetched_once(fetch: Fetch) -> None:
    files = ("original/model.safetensors", "metal/model.safetensors", "consolidated.safetensors")
    assert fetch(resolve_checkpoint, "config.json", "model.safetensors", *files) == {"config.json", "model.safetensors"}


def test_the_field_that_named_the_checkpoint_is_told(fetch: Fetch) -> None:
    fetch(resolve_checkpoint, "config.json")
    for name in ("org/other", "nowhere"):
        with pytest.raises(ConfigError, match=rf"^draft_model='{name}': no such folder"), naming("draft_model"):
            resolve_checkpoint(name)
        with pytest.raises(ConfigError, match=rf"^eagle_head='{name}': no such folder"):
            resolve_head("eagle_head", name)


def test_what_is_no_checkpoint_is_told_with_what_is_accepted(fetch: Fetch, tmp_path: Path) -> None:
    fetch(resolve_checkpoint, "config.json")
    (tmp_path / "model.safetensors").touch()
    for name, reason in {
        "/nowhere": "no such folder",
        "/nowhere/model.gguf": "no such file",
        str(tmp_path / "model.safetensors"): "a file, and not a .gguf",
        "org/other": "no such folder, and not to be had from the hub: there is none",
    }.items():
        with pytest.raises(ConfigError, match=f"='{name}': {reason}; accepted: a checkpoint folder, a .gguf file or"):
            resolve_checkpoint(name)


def test_other_fields_keep_their_name() -> None:
    with pytest.raises(ConfigError, match=r"^dtype='q': accepted"), naming("draft_model"):
        raise ConfigError("dtype", "q", "accepted: float32")
