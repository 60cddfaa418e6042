"""Which parameter names the files that a way to draft needs, and what is said where it names none. Any thread."""

from __future__ import annotations

from slipstream.core.errors import ConfigError

# (parameter, what it may name or what else was looked at); without an entry, a method needs no files
DRAFT_FILES = {
    "draft_model": ("draft_model", "a checkpoint, or a model of this repository"),
    "medusa": ("medusa_heads", "the folder of the heads"),
    "eagle": ("eagle_head", "the folder of the head"),
    "mtp": ("mtp_module", "the model's checkpoint has no module"),
}


def missing_files(method: str) -> ConfigError:
    field, what = DRAFT_FILES[method]
    return ConfigError(field, "", f"needed for speculative_method {method}: {what}")
