"""All options of `slipstream serve-openai`, checked once. Frozen; pickled to worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.core.errors import ConfigError
from slipstream.core.trace_context import ENDPOINT_FORM, is_endpoint
from slipstream.server.hosts import HostRule
from slipstream.server.keys import ApiKey
from slipstream.server.reasoning import FORMATS
from slipstream.server.request_log import FORMATS as LOG_FORMATS
from slipstream.server.tools.select import ALIASES as TOOL_ALIASES
from slipstream.server.tools.select import FORMATS as TOOL_FORMATS

_COUNTS = (
    "workers",
    "max_url_bytes",
    "max_headers",
    "max_header_bytes",
    "max_total_header_bytes",
    "max_body_bytes",
    "max_total_body_bytes",
    "max_total_answer_bytes",
    "max_concurrent_requests",
    "max_connections",
)
TOOL_PARSERS = ("auto", *TOOL_FORMATS, *TOOL_ALIASES, "none")
REASONING_PARSERS = ("auto", *FORMATS, "none")


@dataclass(frozen=True)
class GatewayOptions:
    """triton_url: host:port of Triton's gRPC. checkpoints: model -> folder with its tokenizer and chat template, for
    models whose config.pbtxt has no absolute path; model_repository: base of relative paths.

    api_keys: the accepted keys; none: no key is needed. admin_digest: of the key of sleep.py; b"": it is not served.
    max_priority: the most urgent (lowest) priority of requests
    whose key sets none. aliases: public name -> model in Triton.
    allowed_hosts: names in Host headers besides addresses, localhost and `host`.
    metrics_url: Triton's /metrics, appended to the gateway's. max_events_per_s: streamed events per second and worker
    above which several tokens share an event (0: never). log_format: of request_log.py. is_strict: refuse unknown
    fields of requests instead of ignoring them. otlp_endpoint: a collector of traces, "" for none; trace_ratio: share
    of requests that are traced, of those that bring no trace of their own.
    """

    triton_url: str = "localhost:8001"
    host: str = "127.0.0.1"
    port: int = 9000
    workers: int = 1
    model_repository: Path | None = None
    checkpoints: Mapping[str, Path] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    embedding_models: tuple[str, ...] = ()
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    chat_template: Path | None = None
    api_keys: tuple[ApiKey, ...] = ()
    admin_digest: bytes = b""
    max_priority: int = 0
    metrics_url: str = ""
    otlp_endpoint: str = ""
    trace_ratio: float = 1.0
    cors_origins: tuple[str, ...] = ()
    has_page: bool = True
    allowed_hosts: tuple[str, ...] = ()
    max_url_bytes: int = 8 << 10
    max_headers: int = 100
    max_header_bytes: int = 64 << 10
    max_total_header_bytes: int = 16 << 20
    max_body_bytes: int = 4 << 20
    max_total_body_bytes: int = 256 << 20
    max_total_answer_bytes: int = 256 << 20
    max_concurrent_requests: int = 1024
    max_connections: int = 4096
    max_events_per_s: int = 4000
    max_stored_bytes: int = 64 << 20
    stored_response_ttl_s: float = 3600.0
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    send_timeout_s: float = 60.0
    shutdown_timeout_s: int = 30
    log_level: str = "info"
    log_format: str = "text"
    is_strict: bool = False

    @property
    def num_processes(self) -> int:
        """That answer requests: the workers and the reader."""
        return self.workers + 1

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "accepted: an integer of at least 1")
        for name in ("header_timeout_s", "body_timeout_s", "send_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, getattr(self, name), "accepted: a number of seconds above 0")
        HostRule(self.host, self.allowed_hosts)
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", self.port, "accepted: 0 (any free one) to 65535")
        if self.max_events_per_s < 0:
            raise ConfigError("max_events_per_s", self.max_events_per_s, "accepted: 0 (no limit) or more")
        for name in ("max_stored_bytes", "stored_response_ttl_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(name, getattr(self, name), "accepted: 0 (nothing is stored) or more")
        if not is_endpoint(self.otlp_endpoint):
            raise ConfigError("otlp_endpoint", self.otlp_endpoint, f"accepted: {ENDPOINT_FORM}")
        if not 0.0 <= self.trace_ratio <= 1.0:
            raise ConfigError("trace_ratio", self.trace_ratio, "accepted: a number from 0 to 1")
        if self.log_format not in LOG_FORMATS:
            raise ConfigError("log_format", self.log_format, f"accepted: {', '.join(LOG_FORMATS)}")
        if self.tool_parser not in TOOL_PARSERS:
            raise ConfigError("tool_parser", self.tool_parser, f"accepted: {', '.join(TOOL_PARSERS)}")
        if self.reasoning_parser not in REASONING_PARSERS:
            accepted = f"accepted: {', '.join(REASONING_PARSERS)}"
            raise ConfigError("reasoning_parser", self.reasoning_parser, accepted)
        named = [("checkpoint", folder) for folder in self.checkpoints.values()]
        for name, folder in (*named, ("model_repository", self.model_repository)):
            if folder is not None and not folder.is_dir():
                raise ConfigError(name, str(folder), "no such folder")
        if self.chat_template is not None and not self.chat_template.is_file():
            raise ConfigError("chat_template", str(self.chat_template), "no such file")
