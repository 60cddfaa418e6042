"""`slipstream validate` says what the load would say: fields that Triton refuses, and the files of drafters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from slipstream import LLM
from slipstream.core.config_parse import parse_config
from slipstream.core.errors import ConfigError
from slipstream.core.wire_messages import Config
from slipstream.engine.validate import validate
from tiny_heads import make_eagle, make_eagle3, make_medusa, make_mtp
from tiny_model import make_tiny_llama

pytest.importorskip("tritonclient.grpc")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), num_layers=4)


def model_folder(folder: Path, model: Path, more: str = "", **parameters: object) -> Path:
    given = {"model": model, "device": "cpu", "num_blocks": 64, "block_size": 8, "max_num_seqs": 2, **parameters}
    lines = [f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}' for name, value in given.items()]
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text("\n".join(['backend: "slipstream"', *lines, more]))
    return folder


def test_several_engines_are_told_in_words(model: Path, tmp_path: Path) -> None:
    report = validate(model_folder(tmp_path / "llm", model, "instance_group { count: 2 }"))
    assert "instance_group: 2 engines, each of which has this" in report and "Replica" not in report


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("sequence_batching { }", "^sequence_batching='given': a request is a whole sequence"),
        ("response_cache { enable: true }", "^response_cache='enable: true': Response Cache does not"),
        ("ensemble_scheduling { }", "^ensemble_scheduling"),
        ("version_policy { specific { versions: [2] } }", r"^version_policy='specific \[2\]': .* has \[1\]"),
        ("max_batch_size: -1", "^max_batch_size=-1: accepted: 0"),
        ('input { name: "text_input" data_type: TYPE_STRING }', "^input text_input='': must specify 'dims'"),
        (
            "instance_group [{ kind: KIND_GPU gpus: [0] }, { kind: KIND_GPU gpus: [1, 2] }]",
            r"^instance_group='gpus \[1, 2\]': accepted: 1 engines x 1 ranks",
        ),
        pytest.param(
            "instance_group { kind: KIND_GPU }",
            "^instance_group='KIND_GPU': this machine has no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_triton_refuses_is_refused(model: Path, tmp_path: Path, more: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate(model_folder(tmp_path / "llm", model, more))


@pytest.mark.parametrize(
    "more",
    [
        "response_cache { enable: false }",
        "response_cache { enable: true } model_transaction_policy { decoupled: false }",
        "version_policy { specific { versions: [1, 2] } }",
        "dynamic_batching { }",
    ],
)
def test_what_triton_takes_is_taken(model: Path, tmp_path: Path, more: str) -> None:
    report = validate(model_folder(tmp_path / "llm", model, more))
    assert "ok: this would load" in report
    told = report.partition("settings that differ from the defaults\n")[2].partition("memory plan")[0]
    names = {line.split(" = ")[0].strip() for line in told.splitlines()}
    assert names == {"model.model", "model.device", "cache.block_size", "cache.num_blocks", "scheduler.max_num_seqs"}


def test_a_load_refuses_sequence_batching() -> None:
    """Triton loads such a model, and then refuses every request."""
    given = json.dumps({"parameters": {"model": {"string_value": "/m"}}, "sequence_batching": {}})
    with pytest.raises(ConfigError, match=r"^sequence_batching"):
        parse_config(Config("llm", 1, "/m", given))


def test_logits_processors_that_cannot_be_imported_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^logits_processors"):
        validate(model_folder(tmp_path / "llm", model, logits_processors="nowhere:Nothing"))


Make = Callable[[Path, Path], Path]
Break = Callable[[dict[str, torch.Tensor]], object]
HEADS: dict[str, tuple[str, Make]] = {
    "medusa": ("medusa_heads", make_medusa),
    "mtp": ("mtp_module", make_mtp),
    "eagle": ("eagle_head", lambda model, folder: make_eagle3(model, folder)),
}
BREAKS: dict[str, tuple[Break, str]] = {
    "shape": (lambda stored: stored.update({first(stored): torch.zeros(3, 5)}), r"has shape \[3, 5\], expected"),
    "missing": (lambda stored: stored.pop(first(stored)), "lacks "),
    "unexpected": (lambda stored: stored.update({f"{first(stored)}.g_idx": torch.zeros(3)}), "has no place for"),
}


def first(stored: dict[str, torch.Tensor]) -> str:
    """A matrix that no other tensor's shape is read from."""
    return next(name for name in sorted(stored) if name.endswith(("q_proj.weight", "1.0.linear.weight")))


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize("how", BREAKS)
def test_the_tensors_of_heads_are_held_against_the_model(model: Path, tmp_path: Path, method: str, how: str) -> None:
    name, make = HEADS[method]
    head = make(model, tmp_path / "head")
    parameters = {"speculative_method": method, name: head}
    assert "ok: this would load" in validate(model_folder(tmp_path / "llm", model, **parameters))
    change, words = BREAKS[how]
    file = next(head.glob("*.safetensors"))
    stored = load_file(file)
    if method == "medusa" and how == "unexpected":  # other names are the model's, which Medusa-2 stores beside them
        stored["medusa_head.7.1.weight"] = torch.zeros(2, 2)
        words = "lacks "
    else:
        change(stored)
    save_file(stored, file)
    with pytest.raises(ConfigError, match=rf"^{name}=.*{words}") as refused:
        validate(tmp_path / "llm")
    with pytest.raises(ConfigError) as by_load:
        LLM(str(model), device="cpu", num_blocks=64, block_size=8, max_num_seqs=2, **parameters)
    assert str(by_load.value) == str(refused.value)


def test_pickled_heads_are_held_against_the_model(model: Path, tmp_path: Path) -> None:
    head = make_eagle(model, tmp_path / "head")
    stored = torch.load(head / "pytorch_model.bin", weights_only=True)
    stored["layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 5)
    torch.save(stored, head / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"^eagle_head=.*has shape \[3, 5\]"):
        validate(model_folder(tmp_path / "llm", model, speculative_method="eagle", eagle_head=head))


@pytest.mark.parametrize(
    ("method", "more", "words"),
    [
        ("medusa", {"medusa_choices": "{0},{0,0},{0,0,0},{0,0,0,0}"}, "^medusa_choices=.*has paths of 4 ranks"),
        ("eagle", {"eagle_depth": 16, "eagle_top_k": 16}, "^eagle_depth=16: with eagle_top_k=16, accepted: "),
    ],
)
def test_trees_that_heads_cannot_draft_are_refused(
    model: Path, tmp_path: Path, method: str, more: dict[str, object], words: str
) -> None:
    name, make = HEADS[method]
    parameters = {"speculative_method": method, name: make(model, tmp_path / "head"), **more}
    with pytest.raises(ConfigError, match=words):
        validate(model_folder(tmp_path / "llm", model, **parameters))


def test_a_draft_model_is_held_against_its_config_and_the_model(model: Path, tmp_path: Path) -> None:
    draft = make_tiny_llama(tmp_path / "draft", num_layers=1)
    parameters = {"speculative_method": "draft_model", "draft_model": draft}
    assert "ok: this would load" in validate(model_folder(tmp_path / "llm", model, **parameters))
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32}))
    with pytest.raises(ConfigError, match=r"^draft_model=.*is made for 32 tokens"):
        validate(tmp_path / "llm")
    (draft / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match=r"^draft_model=.*missing"):
        validate(tmp_path / "llm")
    (draft / "config.json").write_text(json.dumps({**config, "architectures": ["OtherForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"^draft_model's config.json architectures='OtherForCausalLM'"):
        validate(tmp_path / "llm")


def test_the_config_of_a_head_is_told_from_the_models(model: Path, tmp_path: Path) -> None:
    head = make_eagle(model, tmp_path / "head")
    (head / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"^eagle_head's config.json \w+=None: is missing"):
        validate(model_folder(tmp_path / "llm", model, speculative_method="eagle", eagle_head=head))
