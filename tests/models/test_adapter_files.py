"""PEFT's files as people have them, and as nobody should: what an adapter's scales are, and what is refused by name."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from lora_adapters import make_adapter
from safetensors.torch import load_file, save_file
from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn import adapter_alphas
from slipstream.nn.adapter_files import AdapterModel, ranks_of, read_adapter
from slipstream.nn.load import load_model, lora_targets
from slipstream.nn.models.family import FAMILIES
from tiny_checkpoints import make_checkpoint

Q, Q_OF_1, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama2-mha", tmp_path_factory.mktemp("llama")).path


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> AdapterModel:
    decoder = load_model(ModelConfig(model=str(checkpoint), device="cpu", enable_lora=True, max_lora_rank=4))
    return AdapterModel(lora_targets(decoder).targets, FAMILIES.get(decoder.spec.architecture), 4)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({"q_proj": 2, Q: 3}, {Q: 2, Q_OF_1: 2, UP: 8}),
        ({Q: 3, "q_proj": 2}, {Q: 3, Q_OF_1: 2, UP: 8}),
        ({"proj": 2, "": 2, "q.proj": 3}, {Q: 3, UP: 8}),  # the whole end of a name, and a point is any character
        ({r"layers\.[1-2]\..*(q|k)_proj": 2, ".*self.*": 5}, {Q: 5, Q_OF_1: 2, UP: 8}),
        ({r"^model.*": 2}, {Q: 2, UP: 2}),
    ],
)
def test_patterns_match_ends_of_names(
    checkpoint: Path, model: AdapterModel, tmp_path: Path, patterns: dict[str, float], expected: dict[str, float]
) -> None:
    folder = make_adapter(tmp_path, checkpoint, 1, lora_alpha=8, alpha_pattern=patterns)
    stored, read = load_file(folder / "adapter_model.safetensors"), read_adapter(folder, model, torch.float32)
    for module, alpha in expected.items():
        torch.testing.assert_close(read[module].b, alpha / 4 * stored[f"base_model.model.{module}.lora_B.weight"])


def test_a_pattern_without_end_does_not_hold_up_the_engine(
    checkpoint: Path, model: AdapterModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_alphas, "MATCH_TIMEOUT_S", 0.5)
    folder = make_adapter(tmp_path, checkpoint, 1, alpha_pattern={"([^x]+)+x": 1})
    start = time.monotonic()
    for read in (lambda: read_adapter(folder, model, torch.float32), lambda: ranks_of(folder, model)):
        with pytest.raises(ConfigError, match=r"alpha_pattern of adapter_config.json takes longer than 0.5 s to match"):
            read()
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights='lora_ga' of .* PEFT has changed"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora={'nblocks': 2} of adapter_config.json is not served"),
        ({"kasa_config": {"beta": 1.0}}, "kasa_config=.* is not served"),
        ({"use_rslora": "false"}, "use_rslora of adapter_config.json must be true or false"),
        ({"alpha_pattern": {"(?i)q_proj": 2}}, "alpha_pattern of adapter_config.json must hold numbers by pattern"),
        ({"alpha_pattern": {"x" * (1 << 20): 2}}, r"has \d+ bytes; accepted: at most 1048576"),
    ],
)
def test_configs_that_cannot_be_served(
    checkpoint: Path, model: AdapterModel, tmp_path: Path, config: dict[str, object], message: str
) -> None:
    folder = make_adapter(tmp_path, checkpoint, 1, **config)
    with pytest.raises(ConfigError, match=message):
        read_adapter(folder, model, torch.float32)


@pytest.mark.parametrize("other", [f"{Q}.lora_A.weight", f"base_model.model.{Q}.lora_A.default.weight"])
def test_two_matrices_of_one_module_are_refused(
    checkpoint: Path, model: AdapterModel, tmp_path: Path, other: str
) -> None:
    file = make_adapter(tmp_path, checkpoint, 1) / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, other: torch.zeros_like(tensors[f"base_model.model.{Q}.lora_A.weight"])}, file)
    with pytest.raises(ConfigError, match="which are of one module; accepted: one of them"):
        read_adapter(tmp_path, model, torch.float32)


def test_names_may_lack_what_peft_puts_before_them(checkpoint: Path, model: AdapterModel, tmp_path: Path) -> None:
    file = make_adapter(tmp_path, checkpoint, 1) / "adapter_model.safetensors"
    expected = read_adapter(tmp_path, model, torch.float32)
    save_file({name.removeprefix("base_model.model."): one for name, one in load_file(file).items()}, file)
    found = read_adapter(tmp_path, model, torch.float32)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].b, pair.b) for name, pair in expected.items())
