"""The objects that attention ops take, from their fields by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from slipstream_kernels import ops

KINDS = (ops.KvCache, ops.AttentionMetadata, ops.AttentionOptions)


def attention_arguments(q: torch.Tensor, **given: Any) -> tuple[Any, ...]:
    """q, cache, metadata and options, as ops take them by place."""
    of_kinds = [{own.name for own in fields(kind)} for kind in KINDS]
    unknown = given.keys() - set.union(*of_kinds)
    assert not unknown, f"no field of a cache, metadata or options: {unknown}"
    return q, *(kind(**{name: given[name] for name in names & given.keys()}) for kind, names in zip(KINDS, of_kinds))
