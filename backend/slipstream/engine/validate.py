"""`slipstream validate`: checks a model folder as a load would, without a server and without reading weights.

Reads config.pbtxt, the checkpoint's config, tokenizer and tensor headers, and the headers of adapters and drafters, and
works out the memory plan, with the code of a load, so that the two cannot disagree. What Triton refuses by itself is in
declared_model.py. Needs the protobuf classes of tritonclient to read config.pbtxt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.core.config import EXIT_RESERVE_S, EngineConfig, ServingConfig
from slipstream.core.config_checks import unused_options
from slipstream.core.config_parse import parse_parameters, with_replica
from slipstream.core.errors import ConfigError
from slipstream.core.generation_config import with_generation_defaults
from slipstream.core.logits_processors import ServedProcessors
from slipstream.core.pbtxt_parameters import check_given_once, config_path
from slipstream.core.replicas import Replica
from slipstream.engine.declared_model import check_dims, check_placement, check_scheduling, served_version
from slipstream.protocol.contract import TASKS
from slipstream.protocol.tensor_spec import TYPE_NAMES, TaskContract

if TYPE_CHECKING:
    from slipstream.worker.hardware import Hardware

BACKEND = "slipstream"


def validate(model_dir: str | Path) -> str:
    """A report of what would be loaded. Raises ConfigError with the field, its value and what is accepted."""
    folder = Path(model_dir).resolve()
    declared = read_config(folder)
    check_declaration(declared, folder)
    parameters = {name: entry.string_value for name, entry in declared.parameters.items()}
    check_given_once(config_path(folder), parameters)
    config = parse_parameters(
        parameters,
        folder,
        served_version(declared, folder),
        declared.max_batch_size,
    )
    groups = [{"count": group.count, "gpus": list(group.gpus)} for group in declared.instance_group]
    config, *others = replicas_of(config, groups)
    check_placement(declared)
    check_scheduling(declared, TASKS[config.task])
    check_tensors(declared, TASKS[config.task])
    check_dims(declared)
    parts = [f"{folder.name}: {config.task} model, {config.model.model or config.model.tokenizer}", _settings(config)]
    parts += [f"warning: {told}" for told in unused_options(config)]
    parts.append(_plan(config, others) if config.task == "generate" else _tokenizer(config))
    if others:
        parts.append(f"instance_group: {1 + len(others)} engines, each of which has this")
    return "\n".join([*parts, _exit_timeout(config.serving), "ok: this would load"])


def passed_over(model_dir: str | Path) -> str:
    """Why a model of a repository is none to check, empty for one of this backend. Raises ConfigError."""
    declared = read_config(Path(model_dir).resolve())
    kind = declared.platform if declared.platform == "ensemble" else declared.backend
    told = {"ensemble": "an ensemble, which Triton itself runs", "python": "a model of Triton's Python backend"}
    return f"not checked: {told[kind]}" if kind in told else ""


def replicas_of(config: EngineConfig, groups: list[dict[str, Any]]) -> list[EngineConfig]:
    """The configuration of each engine that instance_group asks for."""
    first = with_replica(config, groups, 0)
    return [first, *(with_replica(config, groups, index) for index in range(1, first.parallel.replica.num_replicas))]


def read_config(folder: Path) -> Any:
    """config.pbtxt as Triton's ModelConfig message."""
    path = folder / "config.pbtxt"
    if not path.is_file():
        raise ConfigError("model_dir", str(folder), "accepted: a model folder, which holds a config.pbtxt")
    try:
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2
    except ImportError as error:
        needed = "reading config.pbtxt needs the package tritonclient[grpc]: pip install 'tritonclient[grpc]'"
        raise ConfigError("config.pbtxt", str(path), f"{needed} ({error})") from error
    try:
        return text_format.Parse(path.read_text("utf-8"), model_config_pb2.ModelConfig())
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise ConfigError("config.pbtxt", str(path), f"cannot be parsed: {error}") from error


def check_declaration(declared: Any, folder: Path) -> None:
    """Check what Triton and the C++ backend check before the engine starts."""
    if declared.name and declared.name != folder.name:
        raise ConfigError("name", declared.name, f"accepted: the folder's name, {folder.name!r}, or leave it out")
    if declared.backend != BACKEND:
        accepted = f"accepted: {BACKEND!r}; models of other backends are checked when they load"
        raise ConfigError("backend", declared.backend or declared.platform, accepted)


def check_tensors(declared: Any, task: TaskContract) -> None:
    """Inputs and outputs that config.pbtxt lists itself must be some of the contract's, of the same type."""
    for side, given, known in (("input", declared.input, task.inputs), ("output", declared.output, task.outputs)):
        types = {spec.name: TYPE_NAMES[spec.dtype] for spec in known}
        for entry in given:
            name = f"{side} {entry.name}"
            if entry.name not in types:
                raise ConfigError(
                    name, entry.name, f"no tensor of the {task.task} task; accepted: {', '.join(sorted(types))}"
                )
            data_type = (
                type(declared).DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_number[entry.data_type].name
            )
            if data_type != types[entry.name]:
                raise ConfigError(name, data_type, f"accepted: {types[entry.name]}")


def _settings(config: EngineConfig) -> str:
    """The values that differ from the defaults."""
    default, lines = EngineConfig(), []
    for section in ("model", "cache", "scheduler", "parallel", "speculation", "serving"):
        defaults = dict(_values(getattr(default, section)))
        values = _values(getattr(config, section))
        lines += [f"  {section}.{name} = {value}" for name, value in values if value != defaults[name]]
    return "\n".join(["settings that differ from the defaults", *(lines or ["  none"])])


def _values(section: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a section and, in their place, those of the options of speculation methods."""
    for field in fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Mapping):
            for options in value.values():
                yield from _values(options)
        elif field.compare and not isinstance(value, Replica):  # of instance_group, which has a line of its own
            yield field.name, value


def _exit_timeout(serving: ServingConfig) -> str:
    drain = f"drain_timeout_s={serving.drain_timeout_s:g} and {EXIT_RESERVE_S} s"
    return f"its server needs --exit-timeout-secs={serving.exit_timeout_s} or more: {drain}"


def _plan(config: EngineConfig, others: list[EngineConfig]) -> str:
    """others: further engines of the model, which only have to find their GPUs."""
    from slipstream.engine.adapters import adapter_report
    from slipstream.engine.placement import placed
    from slipstream.nn.checkpoint_path import resolve_checkpoint, resolve_tokenizer
    from slipstream.nn.load import check_model
    from slipstream.nn.read_spec import read_spec
    from slipstream.tokenizer.tokenizer import TextTokenizer
    from slipstream.worker.hardware import free_device_memory
    from slipstream.worker.plan_memory import plan_memory
    from slipstream.worker.resolve_hardware import resolve_hardware
    from slipstream.worker.spec_decode.draft_model import check_draft_model

    config, *_ = [placed(one) for one in (config, *others)]
    checkpoint = resolve_checkpoint(config.model.model)
    spec = read_spec(checkpoint, config.model.rope_scaling)
    ServedProcessors(config.model, config.serving.max_logits_processor_bytes)
    TextTokenizer.load(resolve_tokenizer(config.model.tokenizer or str(checkpoint)))
    hardware = resolve_hardware(config, spec)
    if config.model.load_format != "null":
        check_model(config.model, spec, hardware.device, hardware.dtype, hardware.kv_dtype, hardware.parallel)
    planned = plan_memory(spec, config, hardware, free_device_memory(hardware))
    if "draft_model" in config.speculation.loaded and config.model.load_format != "null":
        check_draft_model(config, spec, hardware.device, planned.max_model_len)
    plan = str(planned) + _ranks(hardware, config)
    if config.model.enable_lora:
        plan += "\n" + adapter_report(config.model, spec, hardware)
    defaults = with_generation_defaults(config, checkpoint).serving.generation_defaults
    told = ", ".join(f"{name}={value}" for name, value in defaults)
    return f"{plan}\nsampling defaults of generation_config.json: {told}" if told else plan


def _ranks(hardware: Hardware, config: EngineConfig) -> str:
    """Where the ranks of a model that several share are, "" for one alone."""
    parallel, settings, device = hardware.parallel, config.parallel, hardware.device
    if parallel.num_ranks == 1:
        return ""
    first, each = device.index or 0, parallel.num_local
    where = f"{device}" if device.type == "cpu" else f"cuda:{first} to cuda:{first + each - 1}"
    held = f"{parallel.num_ranks} ranks, of which each holds the plan above"
    if parallel.num_stages > 1:
        held = f"{parallel.num_stages} stages of {parallel.size}; the plan above is of a rank with the least room"
    lines = [f"  {held}", f"  this machine: {each} on {where}"]
    if settings.num_nodes > 1:
        from slipstream.engine.rank_link import read_secret

        read_secret(settings.rank_secret_file)
        port = settings.rank_address.rpartition(":")[2]
        options = f"--address THIS_MACHINE:{port} --secret-file FILE --nodes {settings.num_nodes} --ranks {each}"
        lines.append(f"  {each} on each other machine, not looked at: slipstream worker {options} --node 1")
    return "\n".join(["", "ranks", *lines])


def _tokenizer(config: EngineConfig) -> str:
    from slipstream.nn.checkpoint_path import resolve_tokenizer
    from slipstream.tokenizer.tokenizer import TextTokenizer

    tokenizer = TextTokenizer.load(resolve_tokenizer(config.model.tokenizer or config.model.model))
    return f"tokenizer of {tokenizer.vocab_size} tokens"
