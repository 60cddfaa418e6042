"""Speculation methods as data: names and the checkpoints that they need. Any thread.

worker/spec_decode/ registers each implementation under the same name.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.core.errors import ConfigError


@dataclass(frozen=True)
class DraftMethod:
    """name: the value of `speculative_method`. parameter: the parameter that names its checkpoint, "" if it needs none.

    expected: text of the error when the checkpoint is missing. is_in_model: the model's own checkpoint may contain it.
    is_model: the parameter may name a model of the repository.
    """

    name: str
    parameter: str = ""
    expected: str = ""
    is_in_model: bool = False
    is_model: bool = False

    def missing(self) -> ConfigError:
        return ConfigError(self.parameter, "", f"needed for speculative_method {self.name}: {self.expected}")


_ALL = (
    DraftMethod("ngram"),
    DraftMethod("draft_model", "draft_model", "a checkpoint, or a model of this repository", is_model=True),
    DraftMethod("medusa", "medusa_heads", "the folder of the heads"),
    DraftMethod("mtp", "mtp_module", "the model's checkpoint has no module", is_in_model=True),
    DraftMethod("eagle", "eagle_head", "the folder of the head"),
)
DRAFT_METHODS = {method.name: method for method in _ALL}
SPECULATIVE_METHODS = tuple(DRAFT_METHODS)  # in the order of their metrics
