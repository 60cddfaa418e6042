"""The ways to draft, as data: their names and the checkpoints that they need. Any thread.

What a way does, holds and refuses is registered under the same name in worker/spec_decode/.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.core.errors import ConfigError


@dataclass(frozen=True)
class DraftMethod:
    """name: as `speculative_method` has it. parameter: which names its checkpoint, "" if it needs none.

    expected: what that may name, or what else was looked at. is_in_model: the model's own checkpoint may hold it.
    is_model: it may be named by the model of the repository that serves it.
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
