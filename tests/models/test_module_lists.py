"""Lists of modules in quantization_config: what an entry means alone, it means in a list of any length."""

from __future__ import annotations

import pytest
from slipstream.nn.models.module_lists import matcher, matches

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
