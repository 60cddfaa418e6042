"""The drafters in models/ and the parameters that serve them, for `make serve SPECULATE=...` and `make demo`."""

from __future__ import annotations

from pathlib import Path

from slipstream.core.draft_methods import DRAFT_METHODS

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "models"
CODE_DRAFTERS, CHAT_DRAFTERS = "slipstream-demo", "smollm2-135m"  # first part of the names of their folders
_SUFFIXES = {"draft_model": "draft"}


def drafter_parameters(method: str, drafters: str) -> dict[str, str]:
    """The parameters of config.pbtxt for one method. drafters: whose; "" for a model that none were trained for.

    Raises ValueError, with what to do, for another method or if the repository has no such drafter.
    """
    if method not in DRAFT_METHODS.names():
        raise ValueError(f"SPECULATE={method}: accepted are {', '.join(DRAFT_METHODS.names())}")
    chosen, parameter = {"speculative_method": method}, DRAFT_METHODS.get(method).checkpoint
    if not parameter:
        return chosen
    if not drafters:
        raise ValueError(f"SPECULATE={method}: no drafter was trained for this model; SPECULATE=ngram needs none")
    folder = MODELS / f"{drafters}-{_SUFFIXES.get(method, method)}"
    if not any(folder.glob("*.safetensors")):
        how = "train it (docs/speculation.md, Training heads), or take SPECULATE=ngram, which needs none"
        raise ValueError(f"SPECULATE={method}: {folder.relative_to(ROOT)} is not there; {how}")
    return {**chosen, parameter: str(folder)}
