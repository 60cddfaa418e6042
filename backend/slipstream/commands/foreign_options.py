"""What to write instead of options of vLLM's server and of tritonserver, which `slipstream serve` does not have."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.config_parse import parameter_default
from slipstream.core.config_table import FOREIGN, PARAMETERS

_SHORT = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-q": "quantization",
    "-O": "compilation_config",
}
_INSTEAD = {
    "port": "write --openai-port, or --http-port for Triton's own protocol",
    "served_model_name": "write --alias NAME=llm, with --openai-port",
    "api_key": "write --api-key-file FILE, with a key in each line",
    "tool_call_parser": "write --tool-parser NAME; by default it is read off the chat template",
    "enable_auto_tool_choice": "leave it out: requests with `tools` may always be answered by calls",
    "lora_modules": """write --set enable_lora=true --set lora_modules='{"NAME": "FOLDER"}'""",
    "allowed_origins": "write --cors-origin, an option of `slipstream serve-openai`",
    "uvicorn_log_level": "write --log-level, an option of `slipstream serve-openai`",
    "ssl_keyfile": "put TLS in front of the gateway, which speaks plain HTTP",
    "ssl_certfile": "put TLS in front of the gateway, which speaks plain HTTP",
}
_TRITONS = (  # the first words of its options
    *("log_", "http_", "grpc_", "metrics_", "allow_", "model_control_", "backend_", "cache_", "exit_", "rate_"),
    *("cuda_memory_", "pinned_memory_", "strict_", "trace_", "response_cache_", "buffer_manager_", "min_supported_"),
)


def advice(unknown: Sequence[str], given: Sequence[str]) -> str:
    """A line for each of the unknown options that others have. given: the whole command, where their values are."""
    lines = []
    for index, word in enumerate(given):
        if not word.startswith("-") or word not in unknown:
            continue
        option, equals, value = word.partition("=")
        behind = given[index + 1] if index + 1 < len(given) and not given[index + 1].startswith("-") else ""
        if told := _advice_on(_SHORT.get(option) or option.lstrip("-").replace("-", "_"), value if equals else behind):
            lines.append(f"{option}: {told}")
    return "".join(f"\n  {line}" for line in lines)


def _advice_on(name: str, value: str) -> str:
    if name in _INSTEAD:
        return _INSTEAD[name]
    for flag, is_on in ((name, True), (name.removeprefix("no_"), False)):
        for parameter in PARAMETERS:
            if flag in (parameter.name, *parameter.aliases):
                if not value and isinstance(parameter_default(parameter), bool | None):
                    value = "true" if is_on else "false"
                return f"a parameter of the model; write --set {flag}={value or 'VALUE'}"
    if name in FOREIGN:
        return FOREIGN[name][1]
    return "an option of tritonserver; write it behind a lone --" if name.startswith(_TRITONS) else ""
