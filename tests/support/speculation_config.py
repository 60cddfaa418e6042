"""Makes the speculation section of a configuration, the parameters of the methods included."""

from __future__ import annotations

from dataclasses import fields, replace

from slipstream.core.config import SpeculationConfig
from slipstream.core.draft_methods import DRAFT_METHODS


def speculation_config(methods: str = "", **values: object) -> SpeculationConfig:
    """values: fields of SpeculationConfig and of the methods' options, all by their own names."""
    options = {}
    for method in DRAFT_METHODS.values():
        names = {field.name for field in fields(method.options)}
        options[method.name] = method.options(**{name: values.pop(name) for name in names & values.keys()})
    return replace(SpeculationConfig(methods, options=options), **values)  # type: ignore[arg-type]
