"""Slipstream: an LLM backend for Triton Inference Server, usable as a library too.

`from slipstream import LLM, SamplingParams`: names are resolved on first use, so that `import slipstream` stays light
(the C++ backend's tools and the tokenizer tasks import this package without torch).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.core.sampling_params import Guide, SamplingParams
    from slipstream.engine.llm import LLM, Completion

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "Guide", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "slipstream.engine.llm",
    "Completion": "slipstream.engine.llm",
    "Guide": "slipstream.core.sampling_params",
    "SamplingParams": "slipstream.core.sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
