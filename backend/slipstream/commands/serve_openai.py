"""Start the OpenAI-compatible gateway, with the chat page at /, in front of a running Triton server.

    slipstream serve-openai --triton localhost:8001 --model-repository model_repository
    curl localhost:9000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"model": "llm", "messages": [{"role": "user", "content": "Hello"}]}'

The gateway needs each model's tokenizer folder for its chat template. It finds it when config.pbtxt says an absolute
path; relative paths need --model-repository, and for a server on another machine --checkpoint names a local copy.
docs/gateway.md has the endpoints, the limits and the errors.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from slipstream.core.errors import ConfigError

AUTO = "auto"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--triton", default="localhost:8001", metavar="HOST:PORT", help="Triton's gRPC (%(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 listens on every interface (%(default)s)")
    parser.add_argument("--port", type=int, default=9000, help="0 takes any free one (%(default)s)")
    parser.add_argument(
        "--workers", type=int, default=1, help="processes; one sends some 13 000 events/s (%(default)s)"
    )
    models, access = parser.add_argument_group("models"), parser.add_argument_group("access and limits")
    _add_models(models)
    add_passed_on(models, access)
    _add_access(access)
    parser.add_argument(
        "--metrics-url", default="", metavar="URL", help="Triton's /metrics, shown behind the gateway's"
    )
    parser.add_argument(
        "--trace-ratio", type=float, default=1.0, help="traced share of requests without a trace (%(default)s)"
    )
    parser.add_argument("--no-page", action="store_true", help="do not serve the chat page")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--log-format", default="text", choices=("text", "json"), help="of the log (%(default)s)")


def add_passed_on(models: argparse._ArgumentGroup, access: argparse._ArgumentGroup) -> None:
    """The options that `slipstream serve` and `make serve` take, too, for the gateway that they start."""
    models.add_argument(
        "--alias", action="append", default=[], metavar="NAME=MODEL", help="a further public name (repeatable)"
    )
    models.add_argument(
        "--tool-parser",
        default=AUTO,
        metavar="NAME",
        help="how models write tool calls; auto reads it off the chat template (%(default)s)",
    )
    models.add_argument(
        "--reasoning-parser",
        default=AUTO,
        metavar="NAME",
        help="how models mark their reasoning; auto reads it off the chat template (%(default)s)",
    )
    models.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="a Jinja template in place of the checkpoint's"
    )
    access.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="accepted keys, one per line, or JSON with limits per key (docs/gateway.md)",
    )
    access.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="serve /sleep, /wake_up and /reload_weights to the holder of the key in it (docs/gateway.md)",
    )
    access.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="further name in Host headers, as of a proxy; *.NAME for names below, * for any (repeatable)",
    )
    access.add_argument(
        "--otlp-endpoint", default="", metavar="URL", help="an OpenTelemetry collector that gets traces of requests"
    )


def advice(unknown: Sequence[str], given: Sequence[str]) -> str:
    """What to write instead of options that this verb does not have; "" where that is not known. given: as typed."""
    if "--model" not in (word.partition("=")[0] for word in unknown):
        return ""
    both = "`slipstream serve --model FOLDER --openai-port 9000` starts both"
    copy = "--checkpoint FOLDER names a copy of a model's tokenizer and chat template"
    return f"\n  --model: the gateway serves what a running Triton has; {both}; {copy}"


def passed_on(arguments: argparse.Namespace) -> list[str]:
    """What was given of these, as words of a command."""
    words = [word for alias in arguments.alias for word in ("--alias", alias)]
    if arguments.tool_parser != AUTO:
        words += ["--tool-parser", arguments.tool_parser]
    if arguments.reasoning_parser != AUTO:
        words += ["--reasoning-parser", arguments.reasoning_parser]
    files = {
        "--chat-template": arguments.chat_template,
        "--api-key-file": arguments.api_key_file,
        "--admin-key-file": arguments.admin_key_file,
    }
    words += [word for option, file in files.items() if file is not None for word in (option, str(file))]
    words += [word for name in arguments.allowed_host for word in ("--allowed-host", name)]
    return words + (["--otlp-endpoint", arguments.otlp_endpoint] if arguments.otlp_endpoint else [])


def _add_models(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model-repository", type=Path, metavar="DIR", help="where relative paths of config.pbtxt count from"
    )
    group.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        metavar="[MODEL=]DIR",
        help="folder with a model's tokenizer and chat template; without MODEL= for every model (repeatable)",
    )
    group.add_argument(
        "--embedding-model",
        action="append",
        default=[],
        metavar="MODEL",
        help="Triton model behind /v1/embeddings (repeatable)",
    )


def _add_access(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="an accepted key; others see it in ps"
    )
    group.add_argument(
        "--max-priority",
        type=int,
        default=0,
        help="most urgent (lowest) priority of a request whose key does not say; else 400 (%(default)s)",
    )
    group.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN", help="web origin that may call")
    _add_limits(group)


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--strict", action="store_true", help="refuse fields that are not known, instead of ignoring and naming them"
    )
    group.add_argument("--max-url-bytes", type=int, default=8 << 10, help="longer URLs get 414 (%(default)s)")
    group.add_argument("--max-headers", type=int, default=100, help="requests with more get 431 (%(default)s)")
    group.add_argument("--max-header-bytes", type=int, default=64 << 10, help="of a request; 431 (%(default)s)")
    group.add_argument(
        "--max-total-header-bytes",
        type=int,
        default=16 << 20,
        help="of all requests of a worker together; 503 (%(default)s)",
    )
    group.add_argument("--max-body-bytes", type=int, default=4 << 20, help="larger requests get 413 (%(default)s)")
    group.add_argument(
        "--max-total-body-bytes",
        type=int,
        default=256 << 20,
        help="of all requests of a worker together; 503 (%(default)s)",
    )
    group.add_argument(
        "--max-total-answer-bytes",
        type=int,
        default=256 << 20,
        help="of all answers of a worker that their clients do not read; the longest kept are closed (%(default)s)",
    )
    group.add_argument(
        "--max-concurrent-requests",
        type=int,
        default=1024,
        help="above it requests get 429, in all workers (%(default)s)",
    )
    group.add_argument("--max-connections", type=int, default=4096, help="per worker; above it 503 (%(default)s)")
    group.add_argument(
        "--max-events-per-s",
        type=int,
        default=4000,
        help="streamed events of a worker above which several tokens share an event; 0 never (%(default)s)",
    )
    group.add_argument(
        "--max-stored-bytes",
        type=int,
        default=64 << 20,
        help="of answers of /v1/responses that are kept; 0 none (%(default)s)",
    )
    group.add_argument(
        "--stored-response-ttl-s", type=float, default=3600.0, help="how long each is kept at most (%(default)s)"
    )
    group.add_argument("--header-timeout-s", type=float, default=10.0, help="to send a request's headers (%(default)s)")
    group.add_argument("--body-timeout-s", type=float, default=60.0, help="to send its body (%(default)s)")
    group.add_argument("--send-timeout-s", type=float, default=60.0, help="to read 64 KiB that wait (%(default)s)")
    group.add_argument(
        "--shutdown-timeout-s", type=int, default=30, help="for running requests at SIGTERM (%(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    try:
        from slipstream.server.keys import read_admin_digest, read_keys
        from slipstream.server.options import GatewayOptions
        from slipstream.server.serve import serve
    except ImportError as error:
        raise ConfigError("serve-openai", error.name, "not installed; pip install 'slipstream[gateway]'") from None
    options = GatewayOptions(
        triton_url=arguments.triton,
        host=arguments.host,
        port=arguments.port,
        workers=arguments.workers,
        model_repository=arguments.model_repository,
        checkpoints={name: Path(folder) for name, folder in map(_checkpoint, arguments.checkpoint)},
        aliases=dict(_pair("--alias", text) for text in arguments.alias),
        embedding_models=tuple(arguments.embedding_model),
        tool_parser=arguments.tool_parser,
        reasoning_parser=arguments.reasoning_parser,
        chat_template=arguments.chat_template,
        api_keys=read_keys(arguments.api_key_file, arguments.api_key),
        admin_digest=read_admin_digest(arguments.admin_key_file),
        max_priority=arguments.max_priority,
        metrics_url=arguments.metrics_url,
        otlp_endpoint=arguments.otlp_endpoint,
        trace_ratio=arguments.trace_ratio,
        cors_origins=tuple(arguments.cors_origin),
        has_page=not arguments.no_page,
        allowed_hosts=tuple(arguments.allowed_host),
        max_url_bytes=arguments.max_url_bytes,
        max_headers=arguments.max_headers,
        max_header_bytes=arguments.max_header_bytes,
        max_total_header_bytes=arguments.max_total_header_bytes,
        max_body_bytes=arguments.max_body_bytes,
        max_total_body_bytes=arguments.max_total_body_bytes,
        max_total_answer_bytes=arguments.max_total_answer_bytes,
        max_concurrent_requests=arguments.max_concurrent_requests,
        max_connections=arguments.max_connections,
        max_events_per_s=arguments.max_events_per_s,
        max_stored_bytes=arguments.max_stored_bytes,
        stored_response_ttl_s=arguments.stored_response_ttl_s,
        header_timeout_s=arguments.header_timeout_s,
        body_timeout_s=arguments.body_timeout_s,
        send_timeout_s=arguments.send_timeout_s,
        shutdown_timeout_s=arguments.shutdown_timeout_s,
        log_level=arguments.log_level,
        log_format=arguments.log_format,
        is_strict=arguments.strict,
    )
    serve(options)
    return 0


def _checkpoint(text: str) -> tuple[str, str]:
    """(model, folder); the model is "" for every model."""
    name, equals, folder = text.partition("=")
    return (name, folder) if equals else ("", text)


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and name and value):
        raise ConfigError(option, text, "accepted: NAME=VALUE")
    return name, value
