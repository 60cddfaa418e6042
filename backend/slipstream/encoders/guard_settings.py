"""The parameters of a `guarded` model's config.pbtxt as one frozen object."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slipstream.core.errors import ConfigError
from slipstream.encoders.guarded import CLOSED, OPEN
from slipstream.encoders.own_server import own_grpc_url
from slipstream.encoders.parameters import Parameters
from slipstream.encoders.window import WindowSettings

MAX_PROMPT_CHECKS = 8
_URL = re.compile(r"[^\s/:\[\]]+:\d+|\[[\da-fA-F:]+\]:\d+")


@dataclass(frozen=True)
class GuardSettings:
    llm: str
    safety: str
    prompt_checks: tuple[str, ...]  # further models with the tensors of `safety`, for prompts alone
    quality: str
    triton_url: str
    on_failure: str
    encoder_timeout_s: float
    llm_timeout_s: float
    window: WindowSettings
    max_prompt_chars: int


def read_settings(parameters: Parameters) -> GuardSettings:
    """Raises ConfigError."""
    hold_back = parameters.integer("hold_back_chars", 80, 0, 100_000)
    stride = parameters.integer("check_every_chars", 40, 1, 100_000)
    size = parameters.integer("window_chars", 240, 1, 1_000_000)
    if size < hold_back + stride:
        raise ConfigError(
            "window_chars", size, f"accepted: at least hold_back_chars + check_every_chars = {hold_back + stride}"
        )
    settings = GuardSettings(
        llm=parameters.text("llm", "llm"),
        safety=parameters.text("safety", "safety"),
        prompt_checks=_prompt_checks(parameters),
        quality=parameters.text("quality", "quality"),
        triton_url=_triton_url(parameters.text("triton_url", "")),
        on_failure=parameters.choice("on_encoder_failure", CLOSED, (OPEN, CLOSED)),
        encoder_timeout_s=parameters.integer("encoder_timeout_ms", 30_000, 1, 3_600_000) / 1e3,
        llm_timeout_s=parameters.integer("llm_timeout_ms", 120_000, 1, 86_400_000) / 1e3,
        window=WindowSettings(size, hold_back, stride),
        max_prompt_chars=parameters.integer("max_prompt_chars", 200_000, 1, 1_000_000),
    )
    parameters.refuse_others()
    return settings


def _prompt_checks(parameters: Parameters) -> tuple[str, ...]:
    names = parameters.names("prompt_checks")
    if len(names) > MAX_PROMPT_CHECKS:
        raise ConfigError("prompt_checks", ",".join(names), f"accepted: at most {MAX_PROMPT_CHECKS} models, by commas")
    return names


def _triton_url(given: str) -> str:
    url = given or own_grpc_url()
    if not _URL.fullmatch(url):
        raise ConfigError("triton_url", url, "accepted: host:port of a Triton server's gRPC, such as 127.0.0.1:8001")
    return url
