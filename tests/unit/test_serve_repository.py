"""`make serve MODEL=...`: which models get the other checkpoint, and what `llm` gives up with its own."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from slipstream.core.config_parse import parse_parameters
from slipstream.core.draft_methods import DraftModelOptions, EagleOptions

ROOT = Path(__file__).resolve().parents[2]
PARAMETER = re.compile(r'^parameters \{ key: "(\w+)" value \{ string_value: "([^"]*)" \} \}$', re.M)


@pytest.fixture(scope="module")
def serve() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_serve", ROOT / "build/serve.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        patch.syspath_prepend(str(ROOT / "build"))  # where a script finds its neighbours
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "another"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def parameters(repository: Path, model: str) -> dict[str, str]:
    return dict(PARAMETER.findall((repository / model / "config.pbtxt").read_text()))


def test_only_language_models_get_another_checkpoint(serve: ModuleType, checkpoint: Path, tmp_path: Path) -> None:
    repository = serve.repository_for(str(checkpoint), tmp_path)
    assert parameters(repository, "llm")["model"] == str(checkpoint)
    for model in ("preprocessing", "postprocessing"):
        assert parameters(repository, model)["tokenizer_dir"] == str(checkpoint)
    others = {path.parent.name for path in serve.REPOSITORY.glob("*/config.pbtxt")} - set(serve.OWN_MODELS)
    assert {"draft", "safety", "quality", "embedding"} <= others
    for model in others:
        assert parameters(repository, model) == parameters(serve.REPOSITORY, model)
    draft = parse_parameters(parameters(repository, "draft"), repository / "draft")
    assert Path(draft.model.model) == ROOT / "models/slipstream-demo-draft", "its relative path leads there still"


def test_llm_gives_up_what_drafted_for_its_own_checkpoint(serve: ModuleType, checkpoint: Path, tmp_path: Path) -> None:
    assert parameters(serve.REPOSITORY, "llm")["draft_model"] == "draft"
    repository = serve.repository_for(str(checkpoint), tmp_path)
    assert "draft_model" not in parameters(repository, "llm")
    parsed = parse_parameters(parameters(repository, "llm"), repository / "llm")
    assert not parsed.speculation.options_of(DraftModelOptions).draft_model


@pytest.mark.parametrize(("methods", "left"), [("eagle,ngram", "ngram"), ("draft_model", ""), ("ngram", "ngram")])
def test_ways_to_draft_that_need_no_checkpoint_stay(serve: ModuleType, methods: str, left: str) -> None:
    given = {"speculative_method": methods, "ngram_max": "3", "eagle_head": "x", "medusa_heads": "y", "model": "z"}
    lines = "\n".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in given.items()
    )
    found = dict(PARAMETER.findall(serve.with_checkpoint(lines, "/another")))
    assert found == {"speculative_method": left, "ngram_max": "3", "model": "/another"}


def test_without_a_model_the_chat_model_is_served(
    serve: ModuleType, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "chat_model", lambda: checkpoint)
    repository = serve.prepare_repository("", tmp_path)
    assert parameters(repository, "llm")["model"] == str(checkpoint)
    told = serve.banner(serve.Address("127.0.0.1", 1, 2, 3), repository)
    assert serve.TEXT_PROMPT in told and "--code" not in told


def test_where_it_cannot_be_fetched_the_code_model_is_served_and_that_is_said(
    serve: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable() -> Path:
        raise OSError("the index does not answer")

    monkeypatch.setattr(serve, "chat_model", unreachable)
    assert serve.prepare_repository("", tmp_path) == serve.REPOSITORY
    assert "the index does not answer" in capsys.readouterr().out
    assert "--code" in serve.banner(serve.Address("127.0.0.1", 1, 2, 3), serve.REPOSITORY)


def test_the_code_model_can_be_asked_for(serve: ModuleType, tmp_path: Path) -> None:
    assert serve.prepare_repository("code", tmp_path) == serve.REPOSITORY
    repository = serve.prepare_repository("code", tmp_path / "set", settings={"max_num_seqs": "3", "num_blocks": "99"})
    assert {"max_num_seqs": "3", "num_blocks": "99"}.items() <= parameters(repository, "llm").items()
    assert serve.serves_code(repository)


def test_a_drafter_of_the_repository_is_served(serve: ModuleType, tmp_path: Path) -> None:
    repository = serve.prepare_repository("code", tmp_path, "eagle")
    found = parameters(repository, "llm")
    assert found["speculative_method"] == "eagle" and found["model"] == parameters(serve.REPOSITORY, "llm")["model"]
    speculation = parse_parameters(found, repository / "llm").speculation
    assert Path(speculation.options_of(EagleOptions).eagle_head) == ROOT / "models/slipstream-demo-eagle"
    assert "--code" in serve.banner(serve.Address("127.0.0.1", 1, 2, 3), repository)


@pytest.mark.parametrize("method", ["draft_model", "medusa", "mtp", "eagle"])
def test_the_repository_has_drafters_for_both_of_its_models(serve: ModuleType, method: str) -> None:
    drafters = sys.modules["drafters"]
    for whose in (drafters.CODE_DRAFTERS, drafters.CHAT_DRAFTERS):
        _, folder = drafters.drafter_parameters(method, whose).values()
        assert (Path(folder) / "config.json").is_file()


def test_the_chat_model_has_drafters_of_its_own(
    serve: ModuleType, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of models/, once they are there; another model has none."""
    folder = tmp_path / "models" / "smollm2-135m-medusa"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    monkeypatch.setattr(sys.modules["drafters"], "MODELS", folder.parent)
    monkeypatch.setattr(sys.modules["drafters"], "ROOT", tmp_path)
    monkeypatch.setattr(serve, "FOLDER", checkpoint)
    monkeypatch.setattr(serve, "chat_model", lambda: checkpoint)
    found = parameters(serve.prepare_repository("", tmp_path / "a", "medusa"), "llm")
    assert (found["speculative_method"], found["medusa_heads"]) == ("medusa", str(folder))
    assert "draft_model" not in found
    with pytest.raises(SystemExit, match=r"SPECULATE=mtp: models/smollm2-135m-mtp is not there; train it"):
        serve.prepare_repository("", tmp_path / "b", "mtp")


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("medusa", "SPECULATE=medusa: no drafter was trained for this model; SPECULATE=ngram needs none"),
        ("magic", "SPECULATE=magic: accepted are ngram, draft_model, medusa, mtp, eagle"),
    ],
)
def test_what_cannot_draft_for_a_model_is_refused(
    serve: ModuleType, checkpoint: Path, tmp_path: Path, method: str, told: str
) -> None:
    with pytest.raises(SystemExit, match=told):
        serve.prepare_repository(str(checkpoint), tmp_path, method)


def test_ngram_drafts_for_any_model(serve: ModuleType, checkpoint: Path, tmp_path: Path) -> None:
    repository = serve.prepare_repository(str(checkpoint), tmp_path, "ngram")
    assert parameters(repository, "llm")["speculative_method"] == "ngram"


def test_a_wrong_setting_is_told_before_a_server_starts(serve: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["serve.py", "--model", "code", "--set", "max_num_seq=8"])
    monkeypatch.setattr(serve, "supervise", lambda *_: pytest.fail("it has started a server"))
    with pytest.raises(SystemExit, match="max_num_seq='8': unknown parameter; did you mean max_num_seqs"):
        serve.main()


def test_paths_in_settings_count_from_the_current_directory(
    serve: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "head").mkdir()
    monkeypatch.chdir(tmp_path)
    written: dict[str, str] = {}
    monkeypatch.setattr(serve, "supervise", lambda _, repository, __: written.update(parameters(repository, "llm")))
    given = ["--set", "speculative_method=eagle", "--set", "eagle_head=head"]
    monkeypatch.setattr(sys, "argv", ["serve.py", "--model", "code", *given])
    serve.main()
    assert written["eagle_head"] == str(tmp_path / "head")
