"""Speculative decoding in the worker. The rows of core/draft_methods.py name the modules that implement the methods."""

from importlib import import_module

from slipstream.core.draft_methods import DRAFT_METHODS
from slipstream.worker.spec_decode.interface import PROPOSERS

for _method in DRAFT_METHODS.values():
    import_module(_method.module)  # registers itself in PROPOSERS

__all__ = ["PROPOSERS"]
