"""Speculation methods as data: one row a method, with all that is known of it outside of its own code.

Standard library only. config.py takes the options from here, config_table.py the parameters, settings.py and stats.py
the names, build/serve.py what belongs to a checkpoint; each reads the rows once, when it is imported. The worker
imports the code of a method from `module`.
"""

# ruff: noqa: E501  (one parameter, one line)
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from slipstream.core.errors import ConfigError
from slipstream.core.parameter import Parameter, at_least, between
from slipstream.core.registry import Registry

DRAFT_SAMPLINGS = ("greedy", "sampled")


@dataclass(frozen=True)
class DraftMethod:
    """name: the value of `speculative_method`. module: registers the method's class under this name in `PROPOSERS`.

    options: a frozen dataclass of `option` fields, each named as the parameter that sets it. checkpoint: the parameter
    that names the method's checkpoint, "" if it needs none; expected: text of the error when it is missing.
    is_in_model: the model's own checkpoint may contain it. is_model: it may be a model of the repository.
    makes_any_number: of drafts, as a request asks; the others compute the model's number for each request.
    """

    name: str
    module: str
    options: type
    checkpoint: str = ""
    expected: str = ""
    is_in_model: bool = False
    is_model: bool = False
    makes_any_number: bool = False

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        where = f"speculation.options.{self.name}"
        return tuple(Parameter(own.name, f"{where}.{own.name}", **own.metadata) for own in fields(self.options))

    def missing(self) -> ConfigError:
        return ConfigError(self.checkpoint, "", f"needed for speculative_method {self.name}: {self.expected}")


def option(default: Any, doc: str, aliases: tuple[str, ...] = (), **bounds: Any) -> Any:
    """A field of a method's options, and its parameter. bounds: further fields of Parameter."""
    return field(default=default, metadata={"doc": doc, "aliases": aliases, **bounds})


@dataclass(frozen=True)
class NgramOptions:
    ngram_max: int = option(
        4,
        "For `ngram`: longest suffix of the text to look for in prompt, output and reference.",
        ("prompt_lookup_max", "speculate_max_ngram_size"),
        **at_least(1),
    )
    ngram_min: int = option(2, "For `ngram`: shortest such suffix.", ("prompt_lookup_min",), **at_least(1))


@dataclass(frozen=True)
class DraftModelOptions:
    draft_model: str = option(
        "",
        "For `draft_model`: a checkpoint folder, a hub id, or the name of another model of the repository.",
        ("tensorrt_llm_draft_model_name",),
    )
    draft_sampling: str = option(
        "greedy",
        "For `draft_model`: draft the likeliest tokens, or sample them with the request's temperature.",
        accepted=DRAFT_SAMPLINGS,
    )


@dataclass(frozen=True)
class MedusaOptions:
    medusa_heads: str = option("", "For `medusa`: the folder of the heads.")
    medusa_choices: str = option(
        "",
        "The tree of `medusa`, like `{0},{0,0},{1}` or `[[0],[0,0],[1]]`: each entry is a node, by the rank taken at each head. Empty: the tree beside the heads, or a built-in one.",
    )


@dataclass(frozen=True)
class MTPOptions:
    mtp_module: str = option(
        "", "For `mtp`: the folder of the module; empty: the extra layers of the checkpoint itself."
    )


@dataclass(frozen=True)
class EagleOptions:
    eagle_head: str = option("", "For `eagle`: the folder of an EAGLE or EAGLE-3 head.", ("eagle_model",))
    eagle_top_k: int = option(4, "Branches per node of the `eagle` tree; 1 is a chain.", **between(1, 16))
    eagle_depth: int = option(5, "Largest depth of the `eagle` tree.", **between(1, 16))


DRAFT_METHODS: Registry[DraftMethod] = Registry("speculative_method")  # in the order of their metrics
for _method in (
    DraftMethod("ngram", "slipstream.worker.spec_decode.ngram", NgramOptions, makes_any_number=True),
    DraftMethod(
        "draft_model",
        "slipstream.worker.spec_decode.draft_model",
        DraftModelOptions,
        "draft_model",
        "a checkpoint, or a model of this repository",
        is_model=True,
    ),
    DraftMethod(
        "medusa", "slipstream.worker.spec_decode.medusa", MedusaOptions, "medusa_heads", "the folder of the heads"
    ),
    DraftMethod(
        "mtp",
        "slipstream.worker.spec_decode.mtp",
        MTPOptions,
        "mtp_module",
        "the model's checkpoint has no module",
        is_in_model=True,
    ),
    DraftMethod("eagle", "slipstream.worker.spec_decode.eagle", EagleOptions, "eagle_head", "the folder of the head"),
):
    DRAFT_METHODS.register(_method.name)(_method)


def default_options() -> Mapping[str, Any]:
    """Default options by method."""
    return {method.name: method.options() for method in DRAFT_METHODS.values()}
