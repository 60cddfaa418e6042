"""Lists of modules in quantization_config: what an entry means alone, it means in a list of any length."""

from __future__ import annotations

import re
from typing import Any

import pytest
from slipstream.core.errors import ConfigError
from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models import module_lists
from slipstream.nn.models.module_lists import matcher, matches
from slipstream.nn.models.quantization import modules_left_out
from transformers.quantizers.quantizers_utils import should_convert_module

MEANT = {  # entry -> modules that it means; it means no other of all these
    "lm_head": ["lm_head"],
    "model.layers.1.": ["model.layers.1.mlp.gate", "model.layers.1.self_attn.q_proj"],
    "mlp.gate": ["model.layers.1.mlp.gate", "model.layers.10.mlp.gate"],
    "self_attn": ["model.layers.1.self_attn.q_proj"],
    "model.layers.10*": ["model.layers.10.mlp.gate", "model.layers.10.mlp.gate_proj"],
    "*gate": ["model.layers.1.mlp.gate", "model.layers.10.mlp.gate"],
    "re:.*0.mlp": ["model.layers.10.mlp.gate", "model.layers.10.mlp.gate_proj"],
    "language_model.model.layers.1.mlp.gate": ["model.layers.1.mlp.gate"],
    "model.language_model.layers.10.mlp": ["model.layers.10.mlp.gate", "model.layers.10.mlp.gate_proj"],
    "re:.*language_model.lm_head$": ["lm_head"],
    "model.layers": [],
    "gate_": [],
    "": [],
}
MEANT["model.layers"] = sorted({module for modules in MEANT.values() for module in modules} - {"lm_head"})
MODULES = sorted({module for modules in MEANT.values() for module in modules})


@pytest.mark.parametrize("entry", MEANT)
def test_an_entry(entry: str) -> None:
    others = tuple(f"model.layers.{layer}.input_layernorm" for layer in range(20, 40))  # a long list is looked up
    assert [module for module in MODULES if matches(entry, module)] == MEANT[entry]
    assert [module for module in MODULES if matcher((entry, *others))(module)] == MEANT[entry]


def test_a_pattern_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match=r"'re:\(' is not a regular expression: missing \)"):
        matcher(("lm_head", "re:("))


EXPRESSIONS = (
    r".*gate",
    r"model\.layers\.\d+\.mlp\.gate",
    "model.layers.[0-9]+.mlp",
    "model.layers.(1|2).self_attn.q_proj$",
    "^lm_head$",
    r".*\.layers\.10\..*",
    "model.layers.1{2}",
)


@pytest.mark.parametrize("entry", EXPRESSIONS)
@pytest.mark.parametrize("method", ["awq", "fp8", "fbgemm_fp8"])
def test_an_expression_without_its_mark_means_what_transformers_takes_it_for(entry: str, method: str) -> None:
    found = left_out({"quant_method": method, "modules_to_not_convert": [entry]})
    assert found == [module for module in MODULES if not should_convert_module(module, [entry])]


@pytest.mark.parametrize("entry", ["(?i).*GATE", "(?i:.*GATE)", "(?s)(?i).*Gate"])
def test_an_expression_may_have_flags(entry: str) -> None:
    """As for transformers up to 4; 5 puts a group around them, which Python 3.11 refuses."""
    lists = {"quant_method": "fp8", "modules_to_not_convert": [entry]}
    assert left_out(lists) == left_out({**lists, "modules_to_not_convert": [".*gate"]}) == MEANT["*gate"]


@pytest.mark.parametrize("entry", ["lm_head(", "(?i)lm_head(", "(?L)lm_head"])
def test_an_entry_that_is_no_expression_is_named_as_it_is_written(entry: str) -> None:
    told = rf"modules_to_not_convert=.*: {re.escape(repr(entry))} is not a regular expression: .*; accepted: names of "
    with pytest.raises(ConfigError, match=told):
        left_out({"quant_method": "awq", "modules_to_not_convert": [entry]})


def left_out(quantization: dict[str, Any], modules: list[str] = MODULES) -> list[str]:
    return sorted(modules_left_out(HFConfig("config.json quantization_config", quantization), modules))


ENDLESS = r"(\w|\w\w|\.)*$(?<!j)"
LONG_NAME = "model.layers.1.mlp.gate_proj" + ".layers.1.mlp.gate_proj" * 20


@pytest.mark.parametrize(
    ("quantization", "field"),
    [
        ({"quant_method": "awq", "modules_to_not_convert": [f"re:{ENDLESS}"]}, "modules_to_not_convert"),
        ({"quant_method": "fp8", "ignored_layers": [ENDLESS]}, "ignored_layers"),
        ({"quant_method": "compressed-tensors", "ignore": [f"re:{ENDLESS}"]}, "ignore"),
        ({"quant_method": "gptq", "dynamic": {f"-:{ENDLESS}": {}}}, "dynamic"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": [f"re:{ENDLESS}"]}}},
            "config_groups g targets",
        ),
    ],
)
def test_an_expression_that_takes_for_ever_ends_the_load_by_name(
    quantization: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_lists, "EXPRESSION_TIMEOUT_S", 0.1)
    told = rf"{field}=.* takes more than 0\.1 s to match .*; accepted: names of modules"
    with pytest.raises(ConfigError, match=told):
        left_out(quantization, [LONG_NAME])


@pytest.mark.parametrize("entry", ["*".join(LONG_NAME[:40]) + "*!", r"re:(\w+\.?)+[!x]", r"re:(a|a|\w|\.)*!"])
def test_an_expression_that_takes_re_for_ever_takes_no_time(entry: str) -> None:
    assert left_out({"quant_method": "modelopt", "exclude_modules": [entry]}, [LONG_NAME]) == []


def test_a_list_that_takes_long_in_all_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_lists, "LIST_TIMEOUT_S", 0.0)
    with pytest.raises(ConfigError, match=r"ignore=.*takes more than 0 s to match; accepted: names of modules"):
        left_out({"quant_method": "compressed-tensors", "ignore": ["re:.*gate"]})
